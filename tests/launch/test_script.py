"""The rendered script itself, run by bash with a small srun."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sites import NASTY, Site

from hpcddp.attempt import decision, ledger
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir, read_json
from hpcddp.submit import prepare

# A controller whose job runs, and which notes what it was asked.
SCONTROL = """
asked=${0%/*}/asked
case "$*" in
  *"show job 6") echo "JobState=COMPLETED Restarts=0" ;; # the one before
  *config*) echo 'ProctrackType = proctrack/linuxproc' ;;
  requeue*) echo requeue >>"$asked" ;;
  *job*)
    grep -qs requeue "$asked" && state=PENDING || echo show >>"$asked"
    echo "JobState=${state:-RUNNING} Restarts=0 PreemptTime=None" ;;
esac
"""


@pytest.fixture
def script(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunDir]]:
    """Renders into a run dir, and looks like a batch job of two nodes."""
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPU_BIND": "none",
        "LOCAL_RANK": "9",
        "OMPI_COMM_WORLD_RANK": "9",
    }.items():
        monkeypatch.setenv(name, value)

    def make(*pairs: tuple[str, Any], root: Path = site.runs, srun: str = "exit 0") -> RunDir:
        flags = Layer()
        for name, value in (("nodes", "2"), ("gpus", 4), ("launcher", "srun"), *pairs):
            flags.put(name, value, "--set")
        site.program("srun", srun)
        site.program("scontrol", SCONTROL)
        return prepare.new_run(site.plan(flags), root)

    yield make
    for path in Path("/proc").glob("[0-9]*"):  # this Slurm never lets a job go
        with contextlib.suppress(OSError):
            if str(site.folder).encode() in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def start(run: RunDir, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", run.script, *args], capture_output=True, text=True, check=False)


SEE = 'printf "%s\\0" "$@" >"$HPCDDP_RUN_DIR/arguments"; env -0 >"$HPCDDP_RUN_DIR/environ"'


def test_values_reach_srun_byte_for_byte_and_nothing_of_them_runs(
    site: Site, script: Callable[..., RunDir]
) -> None:
    pairs = [(f"env.V{i}", value) for i, value in enumerate(NASTY)]
    pairs += [("slurm.comment", "; touch x"), ("slurm.wckey", "`touch x`$(touch x)")]
    run = script(*pairs, root=site.folder / "r $(touch x);'\"%`touch x`é", srun=SEE)
    before = sorted(site.folder.iterdir())
    done = start(run)
    assert done.returncode == 0, done.stderr
    assert sorted(site.folder.iterdir()) == before
    words = (run.path / "arguments").read_text().split("\0")[:-1]
    assert words[-5:] == [sys.executable, "-P", "-m", "hpcddp.worker", str(run.path)]
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--distribution=block"} < set(words)
    environ = dict(
        line.split("=", 1) for line in (run.path / "environ").read_text().split("\0")[:-1]
    )
    assert [environ[f"V{i}"] for i in range(len(NASTY))] == NASTY
    assert environ["MASTER_ADDR"] == "n3"
    assert environ["MASTER_PORT"].isdigit() and environ["HPCDDP_ATTEMPT"] == "1"
    assert "LOCAL_RANK" not in environ and "OMPI_COMM_WORLD_RANK" not in environ


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("srun", []),
        ("fork", ["hpcddp.launch.parent", "1"]),
        ("torchrun", ["hpcddp.launch.torchrun", "1"]),
        ("dask", ["hpcddp.dask.gang", "8"]),
    ],
)
def test_a_process_that_drives_all_gpus_is_started_once_with_their_cpus(
    site: Site, script: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch,
    launcher: str, words: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    site.profile("mine", "cpus_per_gpu = 2")
    asked = (("strategy", "dp"), ("nodes", "1"), ("cluster", "mine"), ("launcher", launcher))
    run = script(*asked, srun=SEE)
    start(run)
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n" in run.script.read_text()
    found = (run.path / "arguments").read_text().split("\0")
    assert {"--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=8"} < set(found)
    if words:
        at = found.index(words[0])
        assert found[at : at + 2] == words


@pytest.mark.parametrize(
    ("code", "left", "cause", "asked"),
    [
        (0, 0, "done", ""),
        (85, 0, "signalled", "show show requeue"),
        (3, 0, "crash", "show show requeue"),
    ],
)
def test_the_script_leaves_with_the_jobs_code(
    site: Site, script: Callable[..., RunDir], code: int, left: int, cause: str, asked: str
) -> None:
    run = script(("requeue.here", False), srun=f"echo from srun; exit {code}")
    assert start(run).returncode == left
    found = ledger.last(run)
    assert found and (found.cause, found.exit_code) == (cause, code)
    assert "from srun\n" in run.log.read_text()
    assert (site.bin / "asked").read_text().split() == ["show", *asked.split()]


def test_a_term_while_the_run_is_claimed_ends_neither_the_claim_nor_the_script(
    site: Site, script: Callable[..., RunDir]
) -> None:
    """A preemption that comes so early must find somebody who can bring the run back."""
    run = script()
    site.program("scontrol", f"touch {site.folder}/asked; sleep 2\n{SCONTROL}")
    process = subprocess.Popen(["bash", run.script], start_new_session=True)
    while not (site.folder / "asked").exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == 0
    assert [a.cause for a in ledger.attempts(run)] == ["done"]


def lost(site: Site, run: RunDir, python: str = sys.executable) -> tuple[int, str, list[str]]:
    """Start a script whose run cannot be reached, and which does not wait: its exit code, what it
    says, and what it asks of scontrol."""
    text = run.script.read_text().replace("SECONDS + 180", "SECONDS").replace("sleep 3\n", "\n")
    text = text.replace(f"readonly PYTHON={sys.executable}\n", f"readonly PYTHON={python}\n")
    asked = site.folder / "requests"
    asked.unlink(missing_ok=True)
    hosts = "[[ $* == *hostnames* ]] && { printf '%s\\n' ${3//,/ }; exit; }\n"
    site.program("scontrol", f'{hosts}echo "$*" >>{asked}; echo JobState=RUNNING; echo linuxproc')
    if python == sys.executable:
        subprocess.run(["/bin/mount", "-t", "tmpfs", "tmpfs", run.path], check=True)
    try:
        done = subprocess.run(
            ["bash", "-s"], input=text, capture_output=True, text=True, check=False, timeout=60
        )
    finally:
        if python == sys.executable:
            subprocess.run(["/bin/umount", "--lazy", run.path], check=True)
    return done.returncode, done.stderr, asked.read_text().splitlines() if asked.exists() else []


def test_a_job_whose_disk_is_away_is_queued_again(
    site: Site, script: Callable[..., RunDir]
) -> None:
    run = script()
    site.program("squeue", "echo 'RUNNING||of ours'")
    code, said, asked = lost(site, run)
    assert code == 0 and "try 1 of 12" in said
    comment = "update JobId=7 Comment=of ours [hpcddp: try 1 of 12, restart 0]"
    assert [x for x in asked if x.startswith(("update", "requeue"))][:2] == [comment, "requeue 7"]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("RUNNING||[hpcddp: try 12 of 12, restart 3]", "giving up after 12 tries"),
        ("COMPLETING||(null)", "the run folder cannot be read or written"),  # somebody cancels it
    ],
)
def test_a_job_whose_disk_is_away_ends(
    site: Site, script: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, row: str, what: str
) -> None:
    run = script()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "4")
    site.program("squeue", f"echo '{row}'")
    code, said, asked = lost(site, run)
    assert code == 1 and what in said and not [x for x in asked if "requeue" in x]


def test_a_job_that_is_not_to_come_back_is_not_queued_again(
    site: Site, script: Callable[..., RunDir]
) -> None:
    run = script(("requeue.enabled", False))
    site.program("squeue", "echo 'RUNNING||(null)'")
    assert lost(site, run)[::2] == (1, [])


@pytest.mark.parametrize(("nodes", "exclude"), [("n1 n2 n3 n9", "n9,n1"), ("n1 n2 n9", "n9")])
def test_a_node_without_python_is_left_while_enough_others_are_there(
    site: Site, script: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch,
    nodes: str, exclude: str,
) -> None:  # fmt: skip
    run = script()
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    site.program("python3", "exit 127")
    site.program("sinfo", f"printf '%s\\n' {nodes}")
    rows = "[[ $* == *%x* ]] && echo 'RUNNING|n9|(null)' || echo PENDING"
    site.program("squeue", rows)
    code, said, _ = lost(site, run, python="/nowhere")
    assert code == 0 and "no Python starts on n1; requeuing the job, try 1 of 3" in said
    want = f"update JobId=7 StartTime=now ExcNodeList={exclude}"
    deadline = time.monotonic() + 20
    while want not in (site.folder / "requests").read_text().splitlines():
        assert time.monotonic() < deadline, (site.folder / "requests").read_text()
        time.sleep(0.1)


CGROUP = "echo ProctrackType = proctrack/cgroup"


def test_where_nothing_outlives_the_job_another_one_waits_for_the_disk(
    site: Site, script: Callable[..., RunDir]
) -> None:
    """Its start, its nodes and the count of tries are in the very request."""
    run = script()
    text = run.script.read_text().replace("SECONDS + 180", "SECONDS")
    run.script.write_text(text.replace("sleep 3\n", "sleep 0\n"))
    site.program("scontrol", CGROUP)
    site.program(
        "sbatch", f"env >{site.folder}/environ; printf '%s\\n' \"$@\" >{site.folder}/asked"
    )
    for comment, told in (
        ("(null)", "[hpcddp: try 1 of 12, restart -1]"),
        ("of ours [hpcddp: try 1 of 12, restart -1]", "of ours [hpcddp: try 2 of 12, restart -1]"),
    ):
        rows = f"[[ $* == *--jobs=7* ]] && echo 'RUNNING|n9|{comment}' || echo '7|{comment}'"
        site.program("squeue", rows)
        subprocess.run(["/bin/mount", "-t", "tmpfs", "tmpfs", run.path], check=True)
        try:
            subprocess.run(["bash", "-s", "3", "look"], input=text, text=True, check=True)
        finally:
            subprocess.run(["/bin/umount", "--lazy", run.path], check=True)
        assert (site.folder / "asked").read_text().splitlines() == [
            "--parsable", "--begin=now+10minutes", "--dependency=afterany:7", "--exclude=n9",
            f"--comment={told}", "bash", "3", "look", f"{run.path}/",
            "instead=7",
        ]  # fmt: skip
        assert "SLURM_JOB_ID" not in (site.folder / "environ").read_text()


def test_a_term_does_not_end_the_script_before_its_ranks(script: Callable[..., RunDir]) -> None:
    """Slurm's TERM comes to all processes of a job; the ranks save first."""
    run = script(
        srun="trap 'sleep 0.3; exit 85' TERM; echo ready >&2; while :; do sleep 0.05; done"
    )
    process = subprocess.Popen(["bash", run.script], start_new_session=True)
    try:
        while not run.log.exists() or "ready" not in run.log.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = ledger.last(run)
    assert found and found.cause == "signalled"


def test_the_same_script_continues_a_run_that_ended(script: Callable[..., RunDir]) -> None:
    run = script(srun="exit 0")
    assert start(run).returncode == start(run).returncode == 0
    assert [a.number for a in ledger.attempts(run)] == [1, 2]


@pytest.mark.parametrize(
    ("action", "newer", "begins"),
    [(decision.FOLLOW, False, True), (decision.NONE, False, False), (decision.FOLLOW, True, False)],
)
def test_a_follow_up_goes_on_only_where_the_run_waits_for_it(
    script: Callable[..., RunDir], action: str, newer: bool, begins: bool
) -> None:
    """sbatch may be heard though it gave no answer: then there are two follow-ups, or the job was
    queued again as well."""
    run = script(srun="exit 0")
    for number in (1, 2)[: 1 + newer]:
        facts = ledger.new_attempt("6", 1, slurm=True, nodes="n1")
        assert ledger.begin(run, facts, lambda earlier: False)
        ledger.end(run, number, 85, decision.PREEMPTED, action)
    done = start(run, "1")
    assert done.returncode == 0
    assert len(ledger.attempts(run)) == 1 + newer + begins
    assert ("needs no follow-up job" in done.stderr) is not begins


def test_a_job_does_not_take_the_place_of_one_that_waits_to_come_back(
    site: Site, script: Callable[..., RunDir]
) -> None:
    run = script(srun="exit 0")
    assert ledger.begin(
        run, ledger.new_attempt("6", 1, slurm=True, nodes="n1"), lambda earlier: False
    )
    ledger.end(run, 1, 85, decision.PREEMPTED, decision.AGAIN)
    site.program("squeue", f"echo '6|PENDING|BeginTime|x|x|||{run.name}'")
    done = start(run)
    assert done.returncode == 1 and "job 6 waits to continue" in done.stderr
    site.program("squeue", f"echo '6|CANCELLED|None|x|x||{run.name}'")
    assert start(run).returncode == 0
    assert len(ledger.attempts(run)) == 2


def test_an_arrays_element_has_a_script_of_its_own(
    site: Site, script: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its follow-up is in no array any more."""
    run = script(srun="exit 0", root=site.folder / "it's")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert start(run).returncode == 0
    own = RunDir(run.path.with_name(f"{run.name}_1"))
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    assert start(own).returncode == 0
    assert [a.number for a in ledger.attempts(own)] == [1, 2]
    assert ledger.attempts(run) == []


def test_an_elements_folder_that_others_may_have_made_is_not_used(
    site: Site, script: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is known beforehand. Nothing is written into it either."""
    run = script(srun='touch "${0%/*}/started"')
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    theirs, mine = run.path.with_name(f"{run.name}_1"), site.write("mine", "precious")
    theirs.mkdir()
    theirs.chmod(0o770)
    (theirs / "host.pyz").symlink_to(mine)
    done = start(run)
    assert done.returncode == 1
    assert f"{theirs}: owned or writable by another user" in done.stderr
    assert mine.read_text() == "precious" and [*theirs.iterdir()] == [theirs / "host.pyz"]
    assert not (site.bin / "started").exists()


ENDS = """
case "$*" in
  *config*) echo 'ProctrackType = proctrack/linuxproc' ;;
  *job*)
    echo look >>"${0%/*}/looks"
    [ "$(wc -l <"${0%/*}/looks")" -lt 3 ] && state=RUNNING || state=COMPLETING
    echo "JobState=$state Restarts=0 PreemptTime=None" ;;
esac
"""


@pytest.mark.parametrize(
    ("words", "cause"), [(" DUE TO PREEMPTION", "preempted"), ("", "cancelled")]
)
def test_slurm_begins_to_end_the_job_while_it_is_decided_about(
    site: Site, script: Callable[..., RunDir], words: str, cause: str
) -> None:
    """It ran at the first look, and does not any more when it is to be queued again."""
    log = site.folder / "log"
    said = f"slurmstepd: error: *** JOB 7 ON n3 CANCELLED AT 2026-01-01T00:00:00{words} ***"
    run = script(srun=f"echo '{said}' >>'{log}'; exit 85")
    site.program("scontrol", ENDS)
    site.program("sbatch", 'echo "$*" >>"${0%/*}/asked"; echo 8')
    with log.open("a") as out:
        subprocess.run(["bash", run.script], stdout=out, stderr=out, check=False)
    (only,) = ledger.attempts(run)
    assert only.cause == cause
    assert (site.bin / "asked").exists() is (cause == "preempted") is (only.successor == "8")


def test_a_run_that_others_can_write_to_is_not_started(script: Callable[..., RunDir]) -> None:
    run = script(srun='touch "$HPCDDP_RUN_DIR/started"')
    run.path.chmod(0o770)
    done = start(run)
    assert done.returncode == 1
    assert "writable by another user" in done.stderr
    assert ledger.attempts(run) == [] and not (run.path / "started").exists()


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("modules = ['cuda 12', 'nccl']", "<load><cuda 12><load><nccl>"),
        ("software = {modules = ['a'], purge = true}", "<purge><load><a>"),
    ],
)
def test_modules_are_loaded_where_a_profile_names_them(
    site: Site, script: Callable[..., RunDir], text: str, calls: str
) -> None:
    site.profile("mine", text)
    site.write("init.sh", 'module() { : "$UNSET_ON_PURPOSE"; printf "<%s>" "$@" >>modules; }\n')
    run = script(("cluster", "mine"))
    environ = {**os.environ, "BASH_ENV": "init.sh"}
    subprocess.run(["bash", run.script], env=environ, check=True)
    assert (site.folder / "modules").read_text() == calls


STEPS = [
    ("modules = ['nosuch']", "software.modules: module load nosuch: exit code 3"),
    ("setup = ['cd /', 'exit 0']", "software.setup: exit 0: exit code 0"),
    ("setup = ['export A=$UNSET_ON_PURPOSE', 'false']", "software.setup: false: exit code 1"),
    ("conda = 'gone'", "software.conda: conda activate gone: exit code 127"),
    ("venv = '/gone'", "software.venv: activate /gone: exit code 1"),
    (
        "container.image = '/gone.sif'",
        "software.container.image: /gone.sif is missing: exit code 1",
    ),
    (
        "container.image = 'torch'",
        "software.container.runtime: apptainer is not on PATH: exit code 1",
    ),
]


@pytest.mark.parametrize(("software", "step"), STEPS)
def test_a_step_that_fails_ends_the_attempt_and_no_rank_starts(
    site: Site, script: Callable[..., RunDir], software: str, step: str
) -> None:
    site.profile("mine", f"[software]\n{software}\n")
    site.write("init.sh", "module() { return 3; }\n")
    run = script(("cluster", "mine"), srun='touch "$HPCDDP_RUN_DIR/started"')
    environ = {**os.environ, "BASH_ENV": "init.sh"}
    done = subprocess.run(["bash", run.script], env=environ, check=False)
    (attempt,) = ledger.attempts(run)
    assert done.returncode == 1 and not (run.path / "started").exists()
    assert (attempt.cause, attempt.action) == ("environment", "none")
    assert step in read_json(run.attempt(1).error)["message"]


def test_ranks_start_in_the_container_with_the_job_s_variables(
    site: Site, script: Callable[..., RunDir]
) -> None:
    """The program on PATH stands for apptainer, and runs the command without any image."""
    (site.folder / "image").mkdir()
    words = 'while [ "$1" != "$IMAGE" ]; do shift; done; shift; exec "$@"'
    site.program(
        "apptainer", f'echo "$*" >>{site.folder}/calls; IMAGE={site.folder}/image; {words}'
    )
    site.program("python3", 'env >>"${0%/*}/environment"; echo "$*" >>"${0%/*}/words"')
    run = script(
        ("software.container.image", str(site.folder / "image")), ("env.GREETING", "it's"),
        srun='while [ "$1" != env ]; do shift; done; RANK=1 exec "$@"',
    )  # fmt: skip
    hidden = {"PYTHONPATH": "/host", "LD_LIBRARY_PATH": "/host/lib", "LD_AUDIT": ""}
    subprocess.run(["bash", run.script], env={**os.environ, **hidden}, check=True)
    said = (site.bin / "environment").read_text().splitlines()
    assert {f"PYTHONPATH={run.package}", "GREETING=it's", "RANK=1"} <= set(said)
    assert not [line for line in said if line.startswith("LD_")]
    assert (site.bin / "words").read_text().splitlines()[-1] == f"-P -m hpcddp.worker {run.path}"
    assert f"--bind={site.folder}:{site.folder} " in (site.folder / "calls").read_text()


@pytest.mark.parametrize(("request_", "asked"), [(False, "show show requeue"), (True, "show")])
def test_the_last_resort_needs_no_python(
    site: Site, script: Callable[..., RunDir], request_: bool, asked: str
) -> None:
    """Every Python is gone when the ranks leave. What a person asked to end does not come back."""
    python = site.folder / "python"
    python.symlink_to(sys.executable)
    more = '; : >"$HPCDDP_RUN_DIR/request.json"' if request_ else ""
    site.program("rm", '/bin/rm "$@"')
    run = script(srun=f"rm {python}{more}; exit 85")
    lines = run.script.read_text().splitlines()
    run.script.write_text(
        "\n".join(
            f"readonly PYTHON={python}" if x.startswith("readonly PYTHON=") else x for x in lines
        )
    )
    assert start(run).returncode == 85
    assert (site.bin / "asked").read_text().split() == asked.split()
