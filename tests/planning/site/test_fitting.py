import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import recorded
from sites import Outcome, Site

from hpcddp.planning.site.wanted import Wanted
from hpcddp.sizes import NodeRange
from hpcddp.spec import JobSpec

Command = Callable[..., Outcome]
HOUR = 3600
READ = r"read 20\d\d-\d\d-\d\d \d\d:\d\d UTC"


@pytest.fixture
def submit(site: Site, hpcddp: Command) -> Command:
    """A dry run on a recorded cluster whose profile was detected."""
    recorded.install(site, "plain")
    assert hpcddp("cluster", "detect").code == 0
    job = ("submit", "toy", "--dry-run", "--set", "global_batch=110880")
    return lambda *words: hpcddp(*job, *words)


def facts(site: Site, change: Callable[[dict[str, Any]], object], profile: str = "plain") -> None:
    """Change the recorded facts."""
    path = site.config / "hpcddp" / "clusters" / f"{profile}.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["-p", "gpuu"], "--partition: unknown partition 'gpuu'", "did you mean gpu?"),
        (["-N", "9"], "--nodes: 9 nodes requested, but partition gpu allows 8 per job",
         "use --nodes 8 or fewer"),
        (["-p", "gpu-debug", "-N", "2", "-t", "1:00:00"],
         "--time: time limit 1:00:00 requested, but partition gpu-debug allows 00:30:00",
         "use --time 00:30:00 or less"),
        (["--gpus", "a100:5"],
         "--gpus: 5 GPUs per node requested, but the nodes of partition gpu have 4 GPUs",
         "use --gpus 4 or fewer, or another partition"),
        (["--gpus", "v100:2"],
         "--gpus: GPUs of the type v100 requested, but the nodes of partition gpu have a100, h100",
         "use one of these types, or another partition"),
        (["--gpus", "h100:8", "-N", "3"],
         "--nodes: 3 nodes requested, but partition gpu has 2 that fit the request",
         "use --nodes 2 or fewer"),
        (["--mem", "600G"],
         "--mem: 600G of memory per node requested, but the nodes of partition gpu have 503 GB",
         "use --mem 515000M or less"),
        (["-A", "speech"], "--account: you have no account 'speech'", "known accounts:"),
        (["-q", "normal"], "--qos: QOS normal may not be used in partition gpu",
         "use one of gpu, gpu_long"),
        (["-q", "gpu_long", "-N", "1"], "--qos: QOS 'gpu_long' may not be used with account vision",
         "known QOSs: gpu, normal"),
        (["-t", "3-00:00:00"],
         "--time: time limit 3-00:00:00 requested, but partition gpu allows 2-00:00:00",
         "use --time 2-00:00:00 or less"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_what_would(
    site: Site, submit: Command, words: list[str], what: str, hint: str
) -> None:
    done = submit(*words)
    assert done.code == 2 and not done.out, done.text
    first = re.sub(rf" \({READ}\)$", "", done.err.splitlines()[0])
    assert first == f"error: {what}" and hint in done.err
    assert not site.runs.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["-N", "8", "--gpus", "a100:4", "-t", "2-00:00:00", "--mem", "500G"],
        ["-N", "2", "--gpus", "h100:8", "--mem", "1000G"],
        ["-p", "gpu-debug,gpu", "-t", "1:00:00"],  # Slurm takes the one that fits
        ["-N", "8-12"],
    ],
)
def test_what_fits_is_accepted(submit: Command, words: list[str]) -> None:
    done = submit(*words)
    assert done.code == 0, done.err


def test_the_case_of_an_account_and_a_qos_does_not_count(submit: Command) -> None:
    done = submit("-A", "Vision", "-q", "GPU")
    assert done.code == 0 and done.err == submit("-A", "vision", "-q", "gpu").err


def test_what_sbatch_options_force_is_a_note(submit: Command) -> None:
    done = submit("--sbatch", "time=3-00:00:00")
    assert done.code == 0
    assert "note: time limit 3-00:00:00 requested, but partition gpu allows 2-00:00:00" in done.err


def test_what_a_detection_read_is_told_with_its_time(site: Site, submit: Command) -> None:
    start = time.time() + HOUR
    facts(site, lambda data: data["reservations"][0].update(start=start, end=start + HOUR))
    done = submit("-t", "3:00:00", "-A", "speech")
    assert re.search(rf"^error: .*'speech' \({READ}\)$", done.err, re.MULTILINE), done.err
    notes = submit("-t", "3:00:00").err
    assert re.search(rf"^note: maintenance .* \({READ}\): a job", notes, re.MULTILINE), notes
    assert "read 20" not in submit("-p", "gpuu").err  # Slurm says it now


def test_a_limit_that_is_a_day_old_refuses_nothing(site: Site, submit: Command) -> None:
    facts(site, lambda data: data.update(read=time.time() - 25 * HOUR))
    done = submit("-A", "speech")
    assert done.code == 0 and "you have no account 'speech' (read 20" in done.err
    assert submit("-p", "gpuu").code == 2  # what Slurm says now


def test_an_account_below_an_allowed_one_is_not_refused(site: Site, submit: Command) -> None:
    facts(site, lambda data: data["associations"][0].update(qos=["gpu", "normal"]))
    done = submit("-A", "biology")
    assert done.code == 0 and "account biology may not use partition gpu: use one of" in done.err


def test_an_association_of_another_partition_limits_nothing(site: Site, submit: Command) -> None:
    def change(data: dict[str, Any]) -> None:
        data["associations"][1].update(partition="gpu-debug", max_tres={"node": 1})

    facts(site, change)
    assert "allows at most 1" not in submit("-N", "2").err
    assert "2 nodes requested, but account vision allows at most 1 for a job" in submit(
        "-N", "2", "-p", "gpu-debug").err  # fmt: skip


def test_accounts_that_nobody_enforces_are_not_refused(site: Site, submit: Command) -> None:
    facts(site, lambda data: data["config"].update(AccountingStorageEnforce="none"))
    done = submit("-A", "speech")
    assert done.code == 0 and "you have no account 'speech'" in done.err


def test_damaged_facts_are_a_note(site: Site, submit: Command) -> None:
    (site.config / "hpcddp" / "clusters" / "plain.json").write_text("{")
    done = submit("-N", "2")
    assert done.code == 0 and "damaged facts" in done.err and "cluster detect" in done.err


def test_the_clusters_gpu_type_does_not_follow_into_another_partition(
    site: Site, submit: Command
) -> None:
    rows = "new|idle|2|64|2|500000|gpu:b200:4|(null)|x[1-2]"
    line = "PartitionName=new State=UP AllowAccounts=ALL AllowQos=ALL"
    for program, more in (("sinfo", rows), ("scontrol", line)):
        path = site.bin / program
        path.write_text(f"{path.read_text()}\ncase \"$*\" in *node*|*config*|*top*|*res*) ;; "
                        f"*) echo '{more}';; esac\n")  # fmt: skip
    site.program("sbatch", "cat >/dev/null; echo 'sbatch: Job 9 to start' >&2")
    done = submit("-p", "new", "--gpus", "4")
    assert done.code == 0, done.err
    assert "#SBATCH --gpus-per-node=4\n" in done.out
    assert "partition new has no a100, the cluster's usual GPU: any type does" in done.err


def qos(data: dict[str, Any], name: str = "gpu") -> dict[str, Any]:
    """The recorded row of a QOS."""
    row: dict[str, Any] = next(row for row in data["qos"] if row["name"] == name)
    return row


def test_limits_of_account_and_qos_count_over_all_nodes(site: Site, submit: Command) -> None:
    facts(site, lambda data: qos(data).update(max_tres={"gres/gpu": 8}))
    assert submit("-N", "2", "--gpus", "4").code == 0
    done = submit("-N", "3", "--gpus", "4")
    assert done.code == 2, done.err
    assert "12 GPUs requested, but QOS gpu allows at most 8 for a job" in done.err
    assert "the job would never start: use at most 8, or another account or QOS" in done.err


@pytest.mark.parametrize(
    ("limit", "words", "what", "hint"),
    [
        ({"node_tres": {"gres/gpu": 2}}, ["-N", "2", "--gpus", "3"],
         "--gpus: 3 GPUs requested, but QOS gpu allows at most 2 for each node",
         "use at most 2, or"),
        ({"max_minutes": {"gres/gpu": 960}}, ["-N", "2", "--gpus", "4", "-t", "2:01:00"],
         "--time: 8 GPUs for 2:01:00 requested, but QOS gpu allows at most 16 gres/gpu hours for",
         "use --time 120 or less"),
    ],
)  # fmt: skip
def test_limits_of_a_node_and_of_the_time_of_a_job(
    site: Site, submit: Command, limit: dict[str, Any], words: list[str], what: str, hint: str
) -> None:
    facts(site, lambda data: qos(data).update(limit))
    assert submit("-N", "2", "--gpus", "2", "-t", "2:00:00").code == 0
    assert submit("-N", "2", "--gpus", "2").code == 0  # the partition's default limit
    done = submit(*words)
    assert done.code == 2 and what in done.err and hint in done.err, done.err


@pytest.mark.parametrize(
    ("partition_qos", "flags", "owner"),
    [
        ("normal", [], "QOS normal of partition gpu allows at most 4 for a job"),
        ("normal", ["OverPartQOS"], "QOS gpu allows at most 6 for a job"),
        ("", [], "QOS gpu allows at most 6 for a job"),
    ],
)
def test_the_first_limit_in_slurms_order_counts(
    site: Site, submit: Command, partition_qos: str, flags: list[str], owner: str
) -> None:
    def change(data: dict[str, Any]) -> None:
        qos(data).update(max_tres={"gres/gpu": 6}, flags=flags)
        qos(data, "normal").update(max_tres={"gres/gpu": 4})

    facts(site, change)
    if partition_qos:
        own = f"s/\\(PartitionName=gpu .*\\)QoS=N.A/\\1QoS={partition_qos}/"
        recorded.change(site, "scontrol", own)
    done = submit("-N", "2", "--gpus", "4")
    assert done.code == 2 and f"8 GPUs requested, but {owner}" in done.err, done.err


def test_a_limit_behind_an_unknown_one_is_a_note(site: Site, submit: Command) -> None:
    recorded.change(site, "scontrol", "s/\\(PartitionName=gpu .*\\)QoS=N.A/\\1QoS=secret/")
    facts(site, lambda data: qos(data).update(max_tres={"gres/gpu": 8}))
    done = submit("-N", "3", "--gpus", "4")
    assert (
        done.code == 0 and "12 GPUs requested, but QOS gpu allows at most 8 for a job" in done.err
    )


def test_limits_that_slurm_does_not_enforce_do_not_count(site: Site, submit: Command) -> None:
    def change(data: dict[str, Any]) -> None:
        data["config"].update(AccountingStorageEnforce="associations")
        qos(data).update(max_tres={"gres/gpu": 8})

    facts(site, change)
    done = submit("-N", "3", "--gpus", "4")
    assert done.code == 0 and "allows at most" not in done.err


def test_a_qos_lifts_the_time_limit_of_its_partition(site: Site, submit: Command) -> None:
    facts(site, lambda data: qos(data).update(flags=["PartitionTimeLimit"], max_wall=""))
    assert submit("-t", "3-00:00:00").code == 0
    done = submit("-t", "3-00:00:00", "-q", "gpu_long", "-A", "vision")
    assert done.code == 2  # that one has no such flag


@pytest.mark.parametrize("words", [["-t", "3-00:00:00"], ["-N", "9"]])
@pytest.mark.parametrize("rows", ["without detection", "private", "of another cluster"])
def test_a_qos_that_is_unknown_may_lift_the_limits_of_its_partition(
    site: Site, submit: Command, words: list[str], rows: str
) -> None:
    if rows == "without detection":
        (site.config / "hpcddp" / "clusters" / "plain.json").unlink()
    elif rows == "private":
        facts(site, lambda data: data.update(qos=[]))
    else:
        words = [*words, "--sbatch", "clusters=other"]
    done = submit(*words)
    assert done.code == 0 and "requested, but partition gpu allows" in done.err


def test_without_accounting_no_qos_lifts_the_limits_of_a_partition(
    site: Site, submit: Command
) -> None:
    def change(data: dict[str, Any]) -> None:
        data.update(qos=[], associations=[])
        data["config"].update(AccountingStorageType="accounting_storage/none")

    facts(site, change)
    assert submit("-t", "3-00:00:00", "--sbatch", "qos=false").code == 2


def test_a_qos_may_require_gpus(submit: Command) -> None:
    done = submit("--procs", "4")
    assert (
        done.code == 2 and "0 GPUs requested, but QOS gpu requires at least 1 per job" in done.err
    )


@pytest.mark.parametrize(
    ("change", "words", "what"),
    [
        ("s/MinNodes=0/MinNodes=2/", ["-N", "1"], "but a job of partition gpu has at least 2"),
        ("s/MaxMemPerNode=UNLIMITED/MaxMemPerNode=100000/", ["--mem", "200G"],
         "200G of memory per node requested, but partition gpu allows 100000 MB"),
        ("s/State=UP/State=DRAIN/", [], "partition gpu is DRAIN: it accepts no jobs"),
        ("s/State=UP/State=INACTIVE/", [], "partition gpu is INACTIVE: it accepts no jobs"),
    ],
)  # fmt: skip
def test_limits_of_a_partition(
    site: Site, submit: Command, change: str, words: list[str], what: str
) -> None:
    recorded.change(site, "scontrol", change)
    done = submit(*words)
    assert done.code == 2 and what in done.err, done.err


def test_a_job_for_another_cluster_is_judged_by_that_one(site: Site, submit: Command) -> None:
    recorded.change(site, "scontrol", "s/=gpu /=${SLURM_CLUSTERS:-gpu} /")
    done = submit("--sbatch", "clusters=other", "-p", "other")
    assert "unknown partition" not in done.err, done.err
    done = submit("--sbatch", "clusters=other,third", "-p", "elsewhere")  # Slurm chooses one
    assert "unknown partition" not in done.err, done.err


def test_defaults_that_a_partition_refuses_are_told(site: Site, submit: Command) -> None:
    profile = site.config / "hpcddp" / "clusters" / "plain.toml"
    profile.write_text('gpu_option = "gpus-per-node"\n')  # no account, no QOS
    done = submit("-p", "gpu")
    text = re.sub(rf" \({READ}\): ", ": ", done.err)
    assert "partition gpu may refuse your default account, biology: use --account" in text
    assert "your default QOS, normal, may not be used in partition gpu: use --qos" in text
    assert submit("-p", "cpu", "--procs", "2").err.count("your default") == 0


def test_a_partition_of_other_groups_is_told(site: Site, submit: Command) -> None:
    recorded.change(site, "scontrol", "s/AllowGroups=ALL/AllowGroups=wheel-x/")
    assert "for other groups than yours: it is for wheel-x" in submit("-p", "gpu").err


def test_what_is_left_to_the_account_is_told(submit: Command) -> None:
    done = submit("-p", "gpu", "-N", "2", "--gpus", "4", "-t", "2:00:00")
    assert done.code == 0
    assert "account vision had 1200 gres/gpu hours left at 20" in done.err
    assert "UTC: an attempt of this job may use 16\n" in done.err


def test_an_unknown_qos_is_a_note(submit: Command) -> None:
    done = submit("-p", "cpu", "--procs", "2", "-q", "gpu_lnog")
    assert re.search(rf"Slurm has no QOS 'gpu_lnog' \({READ}\): known QOSs: gpu, normal", done.err)
    assert done.code == 0 and "`hpcddp cluster detect` reads them again" in done.err


@pytest.mark.parametrize("option", ["mem-per-gpu", "mem-per-cpu"])
def test_memory_of_each_gpu_and_cpu_is_compared(site: Site, submit: Command, option: str) -> None:
    done = submit("--gpus", "4", "--sbatch", f"{option}=200G")
    assert "x 200G of memory per node requested, but the nodes of partition gpu" in done.err
    assert f"use --{option} " in done.err and done.code == 0  # --sbatch asks for it all the same
    with (site.config / "hpcddp/clusters/plain.toml").open("a") as profile:
        profile.write(f'{option} = "200G"\n')  # its last table is [slurm]
    assert submit("--gpus", "4").code == 2


def test_ranks_get_the_cpus_that_their_partition_gives(site: Site, submit: Command) -> None:
    recorded.change(site, "scontrol", "s/MaxCPUsPerNode=UNLIMITED/MaxCPUsPerNode=16/")
    done = submit("--gpus", "4")
    assert done.code == 0, done.err
    assert "#SBATCH --cpus-per-task=4\n" in done.out
    forced = submit("--gpus", "4", "--sbatch", "cpus-per-task=8")
    assert "32 CPUs per node requested, but partition gpu allows 16" in forced.err


def test_a_job_that_runs_into_maintenance_is_told_that_it_waits(
    site: Site, submit: Command
) -> None:
    start = time.time() + 2 * HOUR
    facts(site, lambda data: data["reservations"][0].update(start=start, end=start + HOUR))
    done = submit("-t", "3:00:00")
    assert done.code == 0 and "note: maintenance from " in done.err
    assert "a job with a time limit of more than 1" in done.err  # 119 or 120 minutes
    assert "maintenance" not in submit("-t", "1:00:00").err
    assert "maintenance" not in submit().err  # the partition's default limit is an hour


def test_maintenance_that_has_begun_makes_a_job_wait(site: Site, submit: Command) -> None:
    start = time.time() - HOUR
    facts(site, lambda data: data["reservations"][0].update(start=start, end=start + 3 * HOUR))
    assert ": the job waits for its end" in submit("-t", "0:10:00").err


def test_maintenance_of_some_nodes_leaves_the_others(site: Site, submit: Command) -> None:
    start = time.time() + HOUR

    def change(data: dict[str, Any]) -> None:
        data["reservations"][0].update(start=start, end=start + HOUR, hosts="g[1-11]")

    facts(site, change)
    job = ("--gpus", "a100:4", "-t", "3:00:00")
    assert "maintenance of" not in submit(*job, "-N", "1").err
    assert "note: maintenance of g[1-11] from " in submit(*job, "-N", "2").err


def test_nodes_that_are_down_make_a_job_wait(site: Site, submit: Command) -> None:
    rows = (recorded.CLUSTERS / "plain" / "sinfo").read_text().replace("gpu|idle", "gpu|down*")
    site.program("sinfo", f"cat <<'E'\n{rows}E")
    done = submit("--gpus", "h100:8", "-N", "2")
    assert done.code == 0 and "2 nodes requested, but 0 of 2 in partition gpu are up" in done.err


def test_a_partition_that_is_down_makes_a_job_wait(site: Site, submit: Command) -> None:
    recorded.change(site, "scontrol", "s/State=UP/State=DOWN/")
    done = submit()
    assert done.code == 0 and "partition gpu is DOWN: the job waits until it is up" in done.err


def test_what_slurm_does_not_say_refuses_nothing(site: Site, submit: Command) -> None:
    site.program("sbatch", "cat >/dev/null; echo 'sbatch: Job 9 to start' >&2")
    for program in ("scontrol", "sinfo"):
        site.program(program, "echo 'Unable to contact slurm controller' >&2; exit 1")
    done = submit("--cluster", "plain", "-N", "99", "--gpus", "64", "-p", "nowhere", "--set",
                  f"global_batch={99 * 64}")  # fmt: skip
    assert done.code == 0, done.err


def test_memory_is_read_as_sbatch_reads_it() -> None:
    for text, megabytes in (("4000", 4000), ("64G", 65536), ("1T", 1048576), ("0", 0), ("", 0)):
        job = JobSpec(slurm={"mem": text} if text else {})
        assert Wanted(job, {}, NodeRange(1, 1), 1, "", 1).memory_mb == megabytes


def test_a_dry_run_says_what_an_attempt_may_cost(submit: Command) -> None:
    done = submit("-N", "2", "--gpus", "4", "-t", "3:00:00")
    assert "note: an attempt uses up to 24 GPU hours, of 8 GPUs\n" in done.err
    assert "GPU hours" not in submit("--procs", "4", "-t", "3:00:00", "-p", "cpu", "-q", "normal",
                                     "-A", "biology").err  # fmt: skip
    assert json.loads(submit("--gpus", "4", "--json").out)["gpu_hours"] == 4  # the default limit


def test_a_resume_keeps_what_was_forced_and_drops_the_values_of_the_old_cluster(
    site: Site, submit: Command, hpcddp: Command
) -> None:
    forced = ("--sbatch", "time=3-00:00:00", "--set", "global_batch=110880")
    made = hpcddp("render", "toy", *forced)
    assert made.code == 0, made.err
    run = next(site.runs.iterdir()).name
    again = hpcddp("resume", run, "--dry-run")
    assert again.code == 0, again.err
    assert "note: time limit 3-00:00:00 requested, but partition gpu allows 2-00:00:00" in again.err
    assert "#SBATCH --partition=gpu\n" in again.out
    other = hpcddp("resume", run, "--dry-run", "--cluster", "slurm", "--json")
    assert other.code == 0, other.err
    values = json.loads(other.out)["changes"]
    assert values["slurm.partition"] == ["gpu", None] and "slurm.time" not in values


@pytest.mark.parametrize("cluster", [[], ["--cluster", "plain"]])
@pytest.mark.parametrize(
    ("hours", "age"), [(0, ""), (23, ""), (25, "1 day"), (9 * 24 + 1, "9 days")]
)
def test_submit_calls_slurm_three_times_besides_sbatch(
    site: Site, hpcddp: Command, hours: int, age: str, cluster: list[str]
) -> None:
    """A detection knows the configuration, and its age is said after a day."""
    recorded.install(site, "plain")
    assert hpcddp("cluster", "detect").code == 0
    facts(site, lambda data: data.update(read=time.time() - hours * HOUR))
    before = len(recorded.calls(site))
    done = hpcddp("submit", "toy", "--gpus", "4", *cluster)
    assert done.code == 0
    programs = [call.split()[0] for call in recorded.calls(site)[before:]]
    assert [name for name in programs if name != "sbatch"] == ["scontrol", "sinfo", "squeue"]
    notes = [line for line in done.err.splitlines() if "configuration" in line]
    at = r"at 20\d\d-\d\d-\d\d \d\d:\d\d UTC; `hpcddp cluster detect` reads it again"
    expected = f"note: Slurm's configuration was read {age} ago, {at}"
    assert len(notes) == bool(age) and all(re.fullmatch(expected, line) for line in notes), notes


def test_recent_facts_come_before_older_ones_of_the_same_cluster(
    site: Site, submit: Command
) -> None:
    folder = site.config / "hpcddp" / "clusters"
    for suffix in ("toml", "json"):
        (folder / f"earlier.{suffix}").write_text((folder / f"plain.{suffix}").read_text())
    facts(site, lambda data: data.update(read=time.time() - 50 * HOUR), "earlier")
    before = len(recorded.calls(site))
    done = submit()
    assert done.code == 0 and "configuration was read" not in done.err
    assert not any("show config" in call for call in recorded.calls(site)[before:])


@pytest.mark.parametrize(
    "change",
    [lambda facts: facts["partitions"].pop(), lambda facts: facts["config"].pop("SLURM_VERSION")],
    ids=["of another cluster", "by an older version"],
)
def test_facts_of_another_cluster_or_version_are_not_used_for_the_configuration(
    site: Site, submit: Command, change: Callable[[dict[str, Any]], object]
) -> None:
    facts(site, change)
    before = len(recorded.calls(site))
    assert submit().code == 0
    assert any("show config" in call for call in recorded.calls(site)[before:])
