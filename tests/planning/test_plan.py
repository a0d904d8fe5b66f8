import os
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from sites import Site

from hpcddp import spec
from hpcddp.errors import ClusterError, TopologyError, UserError
from hpcddp.planning import plan
from hpcddp.planning.asked import Asked
from hpcddp.planning.earlier_runs import Measured
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir
from hpcddp.strategy import Layout


def flags(*pairs: tuple[str, Any], where: str = "--set") -> Layer:
    layer = Layer()
    for name, value in pairs:
        layer.put(name, value, where)
    return layer


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("nodes", "0", "begins below 1 node"),
        ("nodes", "-1", "not a number of nodes"),
        ("nodes", "two", "not a number of nodes"),
        ("nodes", "4-1", "goes down"),
        ("name", "a b", "name is 'a b'"),
        ("name", "$(touch x)", "name is"),
        ("name", "../up", "name is"),
        ("name", "-rf", "name is"),
        ("name", "a\nb", "name is"),
        ("name", "ä" * 51, "name is"),
        ("global_batch", 97, "global_batch 97 does not divide over 2 x 4 = 8 ranks"),
        ("nodes", "1-5", "does not divide over 5 x 4 = 20 ranks"),
        ("env.A-B", "1", "no variable name"),
        ("env.RANK", "1", "belongs to the launcher"),
        ("env.SLURM_CONF", "1", "belongs to the launcher"),
        ("env.COMMAND", "1", "the script"),
        ("slurm.ntasks", 8, "ntasks=8 contradicts the map"),
        ("slurm.ntasks_per_node", 8, "contradicts the map"),
        ("slurm.nodes", 2, "contradicts the map"),
        ("slurm.G", 2, "contradicts the map"),
        ("slurm.gres", "gpu:4", "contradicts the map"),
        ("slurm.job-name", "x", "contradicts the map"),
        ("slurm.array", "1-3", "contradicts the map"),
        ("slurm.Time", "1", "not the long name"),
        ("slurm.a=b", "1", "not the long name"),
        ("slurm.time", "abc", "time is 'abc'"),
        ("slurm.time", "1:2:3:4", "time is"),
        ("slurm.time", "-5", "time is"),
        ("slurm.cpus-per-task", "two", "'two' is not a number of CPUs per task"),
        ("slurm.cpus-per-task", 0, "0 is not a number of CPUs per task"),
        ("launcher", "srum", "unknown launcher"),
        ("launcher", "spawn", "does not work with backend slurm"),
        ("template", "slrum.sh.j2", "unknown template"),
        ("template", "x" * 300, "unknown template"),
        ("cluster", "slrum", "unknown cluster"),
        ("strategy", "fspd", "unknown strategy 'fspd'"),
        ("strategy", "dp", "dp is one process on one node"),
        ("strategy", "single", "single is one process, but there are 2 x 4 = 8 ranks"),
        ("strategy", "pp=3,ddp", "pp=3 = 3, but there are 2 x 4 = 8 ranks"),
    ],
)
def test_what_cannot_be_planned(site: Site, name: str, value: Any, what: str) -> None:
    asked = {"nodes": "2", "gpus": 4, name: value}
    with pytest.raises(UserError, match=re.escape(what)) as caught:
        site.plan(flags(*asked.items()))
    assert caught.value.where


def test_the_source_of_a_wrong_value_is_named(site: Site) -> None:
    path = site.job("wide", "nodes = 'two'")
    with pytest.raises(TopologyError) as caught:
        site.plan(job="wide")
    assert caught.value.where == str(path)


def test_a_batch_that_divides_is_offered(site: Site) -> None:
    with pytest.raises(UserError) as caught:
        site.plan(flags(("nodes", "2"), ("gpus", 5), ("global_batch", 96)))
    assert "90 or 100" in caught.value.hint
    with pytest.raises(UserError) as caught:
        site.plan(flags(("gpus", 100)))
    assert "such as 100" in caught.value.hint


@pytest.mark.parametrize(
    ("strategy", "nodes", "good", "bad", "over"),
    [
        ("pp=2,ddp=5", "5", 95, 96, "pp=2,ddp=5: 5 data ranks"),
        ("fsdp,tp=2", "5", 95, 96, "fsdp=5,tp=2: 5 data ranks"),
        ("pp=2,ddp", "1-3", 96, 94, "pp=2,ddp=3: 3 data ranks"),
        ("zero1", "1-3", 96, 94, "2 x 2 = 4 ranks"),
        ("hsdp=2", "1-4", 24, 28, "ddp=3,fsdp=2: 6 data ranks"),
    ],
)
def test_a_batch_divides_over_the_ranks_that_have_samples_of_their_own(
    site: Site, strategy: str, nodes: str, good: int, bad: int, over: str
) -> None:
    asked = (("strategy", strategy), ("nodes", nodes), ("gpus", 2))
    assert str(site.plan(flags(*asked, ("global_batch", good))).nodes) == nodes
    with pytest.raises(UserError) as caught:
        site.plan(flags(*asked, ("global_batch", bad), where="--set"))
    assert caught.value.what == f"global_batch {bad} does not divide over {over}"
    assert caught.value.where == "--set"


def test_any_number_of_nodes_of_a_range_has_a_mesh(site: Site) -> None:
    path = site.job("wide", "global_batch = 96\nnodes = '1-3'\nstrategy = 'pp=4,ddp'\n")
    with pytest.raises(UserError) as caught:
        site.plan(flags(("gpus", 2)), job="wide")
    assert caught.value.what == "pp=4 = 4, but there are 1 x 2 = 2 ranks"
    assert caught.value.where == f"{path}: strategy"
    assert site.plan(flags(("gpus", 4)), job="wide").layout == Layout(pp=4, ddp=3)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        (("nodes", "4"), ("4 nodes", "has 3")),
        (("nodes", "1-4"), ("4 nodes", "has 3")),
        (("gpus", 8), ("8 GPUs per node", "has 4")),
        (("slurm.time", "1-0"), ("1-0", "12:00:00")),
    ],
)
def test_a_limit_is_refused_with_both_numbers(
    site: Site, asked: tuple[str, Any], numbers: tuple[str, str]
) -> None:
    path = site.profile("small", "nodes = 3\ngpus_per_node = 4\nmax_time = '12:00:00'")
    with pytest.raises(ClusterError) as caught:
        site.plan(flags(("cluster", "small"), ("global_batch", 480), asked))
    assert all(number in caught.value.what for number in numbers)
    assert caught.value.where == str(path)
    assert site.plan(flags(("cluster", "small"), ("nodes", "3"), ("gpus", 4))).nodes.max == 3


@pytest.mark.parametrize("variable", ["SBATCH_GPUS_PER_NODE", "SBATCH_DISTRIBUTION"])
def test_a_variable_of_sbatch_that_contradicts_the_map(
    site: Site, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UserError, match="contradicts the map") as caught:
        site.plan()
    assert caught.value.where == variable
    assert site.plan(flags(("cluster", "local"))).backend == "local"


def test_auto_is_slurm_where_sbatch_answers_and_here_elsewhere(site: Site) -> None:
    here = site.plan(flags(("cluster", "auto")))
    assert here.backend == "local"
    assert "running on this machine" in here.notes[0]
    site.program("sbatch", "exit 0")
    assert site.plan(flags(("cluster", "auto"))).backend == "slurm"


def test_a_variable_of_a_profile_may_not_hide_the_scripts_own(site: Site) -> None:
    path = site.profile("mine", "[variables]\nRUN = '/'")
    with pytest.raises(UserError, match="variables name RUN") as caught:
        site.plan(flags(("cluster", "mine")))
    assert caught.value.where == str(path)


def directives(site: Site, *pairs: tuple[str, Any]) -> dict[str, Any]:
    return dict(site.plan(flags(*pairs)).directives(RunDir("/runs/50%/toy-1")))


def test_the_map_and_the_folder_are_options_of_sbatch(site: Site) -> None:
    found = directives(site, ("nodes", "1-2"), ("gpus", 4), ("slurm.qos", "high"))
    assert str(found["nodes"]) == "1-2"
    assert (found["ntasks-per-node"], found["gpus-per-node"]) == (4, "4")
    assert found["job-name"] == "toy-1"
    assert found["output"] == "/tmp/hpcddp-toy-1-%j.log"  # the run's folder may be away
    assert found["chdir"] == site.folder
    assert found["qos"] == "high"


def test_a_persons_own_log_stays_and_its_risk_is_said(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("slurm.output", "logs/%j.out")
    assert directives(site, asked)["output"] == "logs/%j.out"
    assert any("--output is logs/%j.out" in note for note in site.plan(flags(asked)).notes)
    monkeypatch.setenv("SBATCH_OUTPUT", "here.log")
    assert any("SBATCH_OUTPUT is here.log" in note for note in site.plan(flags()).notes)


def test_requeue_is_always_said(site: Site) -> None:
    assert directives(site)["requeue"] is True
    refused = directives(site, ("slurm.requeue", False))
    assert refused["no-requeue"] is True and "requeue" not in refused
    disabled = directives(site, ("requeue.enabled", False))
    assert disabled["no-requeue"] is True and "requeue" not in disabled
    assert not site.plan(flags(("slurm.no-requeue", True))).spec.requeue.enabled


@pytest.mark.parametrize("profile", ["", "[slurm]\nrequeue = true", "[slurm]\nrequeue = false"])
def test_no_requeue_is_said_once(site: Site, profile: str) -> None:
    site.profile("mine", profile)
    asked = flags(("cluster", "mine"), ("slurm.no-requeue", True))
    rows = site.plan(asked).directives(RunDir("/runs/toy-1"))
    assert [row for row in rows if "requeue" in row[0]] == [("no-requeue", True)]


@pytest.mark.parametrize(
    ("profile", "option", "value"),
    [
        ("", "gpus-per-node", "4"),
        ("gpu_type = 'a100'", "gpus-per-node", "a100:4"),
        ("gpu_option = 'gres'", "gres", "gpu:4"),
        ("gpu_option = 'gres'\ngpu_type = 'a100'", "gres", "gpu:a100:4"),
        ("gpu_option = 'none'", "gres", None),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants(
    site: Site, profile: str, option: str, value: str | None
) -> None:
    site.profile("mine", profile)
    found = directives(site, ("cluster", "mine"), ("gpus", 4))
    assert found.get(option) == value


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        ("gres", {"gres": "gpu:4,nvme:1"}),
        ("gpus-per-node", {"gpus-per-node": "4", "gres": "nvme:1"}),
        ("none", {"gres": "nvme:1"}),
    ],
)
def test_what_else_a_node_has_is_asked_for_beside_its_gpus(
    site: Site, option: str, lines: dict[str, str]
) -> None:
    site.profile("mine", f"gpu_option = '{option}'\n[slurm]\ngres = 'nvme:1'")
    plan = site.plan(flags(("cluster", "mine"), ("gpus", 4)))
    rows = [r for r in plan.directives(RunDir("/runs/toy-1")) if r[0] in ("gres", "gpus-per-node")]
    assert sorted(rows) == sorted(lines.items())


def test_cpus_are_an_even_share_of_the_smallest_node(site: Site) -> None:
    site.program("scontrol", "exit 0")
    site.program("sinfo", 'echo "gpu*|64|gpu:8"; echo "gpu*|32|gpu:4"; echo "cpu|12|(null)"')
    assert site.plan(flags(("gpus", 4))).cpus_per_task == 8
    assert site.plan(flags(("gpus", 4), ("slurm.partition", "cpu"))).cpus_per_task == 3
    assert site.plan(flags(("slurm.cpus-per-task", 5))).cpus_per_task == 5
    site.profile("mine", "cpus_per_gpu = 6")
    assert site.plan(flags(("cluster", "mine"))).cpus_per_task == 6
    site.program("sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert site.plan().cpus_per_task == 1


def test_one_process_that_drives_all_gpus_has_their_cpus(site: Site) -> None:
    site.program("scontrol", "exit 0")
    site.program("sinfo", 'echo "gpu*|32|gpu:4"')
    dp = (("strategy", "dp"), ("gpus", 4))
    assert site.plan(flags(*dp)).cpus_per_task == 32
    assert site.plan(flags(*dp, ("slurm.cpus-per-task", 5))).cpus_per_task == 5
    site.profile("mine", "cpus_per_gpu = 6")
    assert site.plan(flags(*dp, ("cluster", "mine"))).cpus_per_task == 24
    here = site.plan(flags(*dp, ("cluster", "local")))
    assert here.cpus_per_task == len(os.sched_getaffinity(0))


def test_one_process_that_drives_all_gpus_is_one_rank_with_all_devices(site: Site) -> None:
    plan = site.plan(flags(("strategy", "dp"), ("gpus", 4), ("global_batch", 7)))
    found = dict(plan.directives(RunDir("/runs/toy-1")))
    assert (found["ntasks-per-node"], found["gpus-per-node"]) == (1, "4")
    job = plan.record(RunDir("/runs/toy-1"))
    assert (job.gpus_per_node, job.ranks_per_node, job.world_size) == (4, 1, 1)
    assert plan.topology.world_size == plan.layout.world_size == 1
    site.profile("small", "gpus_per_node = 3")
    with pytest.raises(ClusterError, match="4 GPUs per node"):
        site.plan(flags(("strategy", "dp"), ("gpus", 4), ("cluster", "small")))


def test_threads_follow_the_cpus_and_a_user_may_say_otherwise(site: Site) -> None:
    site.profile("mine", "cpus_per_gpu = 6\ninterface = 'ib0'\n[env]\nDEBUG = true")
    found = site.plan(flags(("cluster", "mine"))).environment()
    assert found["OMP_NUM_THREADS"] == "6"
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "ib0"
    assert found["DEBUG"] == "true"
    asked = flags(("cluster", "mine"), ("env.OMP_NUM_THREADS", "2"))
    assert site.plan(asked).environment()["OMP_NUM_THREADS"] == "2"


def test_here_the_ranks_talk_over_loopback(site: Site) -> None:
    plan = site.plan(flags(("cluster", "local"), ("nodes", "2"), ("gpus", 4)))
    assert plan.environment()["GLOO_SOCKET_IFNAME"] == "lo"
    assert plan.cpus_per_task == max(1, len(os.sched_getaffinity(0)) // 8)


def test_what_the_nodes_read_is_what_was_planned(site: Site) -> None:
    plan = site.plan(flags(("nodes", "1-2"), ("gpus", 4), ("train.lr", 0.5)))
    job = plan.record(RunDir("/runs/toy-1"))
    assert spec.from_dict(job.spec) == plan.spec
    assert (job.nodes, job.gpus_per_node, job.backend) == ([1, 2], 4, "slurm")
    assert job.world_size == plan.topology.world_size == 8


def test_a_template_is_looked_for_where_it_was_named(site: Site) -> None:
    mine = site.write("mine.sh.j2", "#!/bin/bash\n")
    assert site.plan(flags(("template", "mine.sh.j2"))).template == mine
    assert site.plan(flags(("template", "slurm.sh.j2"))).template.parent.name == "templates"
    profile = site.profile("near", "template = 'near.sh.j2'")
    (profile.parent / "near.sh.j2").write_text("#!/bin/bash\n")
    assert site.plan(flags(("cluster", "near"))).template == profile.parent / "near.sh.j2"


def test_a_name_may_have_letters_of_any_language(site: Site) -> None:
    assert site.plan(flags(("name", "größe_数-1.a+b"))).spec.name == "größe_数-1.a+b"


def test_a_plan_is_whole_and_what_was_asked_stays(site: Site) -> None:
    layer = flags(("name", "toy"), ("start_from", "w.pt"), ("slurm.no-requeue", True))
    asked = Asked.read([layer], [], {})
    site.write("w.pt", "")
    made = plan.make(asked, environ={}, folder=site.folder)
    assert made.spec.start_from == f"{site.folder}/w.pt" and not made.spec.requeue.enabled
    assert asked.spec.start_from == "w.pt" and asked.spec.requeue.enabled
    with pytest.raises(FrozenInstanceError):
        made.measured = Measured(1.0, 2.0, 3.0)  # type: ignore[misc]


def test_the_current_folder_is_where_the_job_works(site: Site) -> None:
    assert site.plan().workdir == site.folder == Path.cwd()
