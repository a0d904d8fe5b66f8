import os
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from sites import Site, flags, nodes

from hpcddp import spec
from hpcddp.errors import ClusterError, UserError
from hpcddp.planning import plan
from hpcddp.planning.asked import Asked
from hpcddp.planning.earlier_runs import Measured
from hpcddp.rundir import RunDir


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("slurm.cpus-per-task", "two", "'two' is not a number of CPUs per task"),
        ("slurm.cpus-per-task", 0, "0 is not a number of CPUs per task"),
        ("launcher", "srum", "unknown launcher"),
        ("launcher", "spawn", "does not work with backend slurm"),
        ("template", "slrum.sh.j2", "unknown template"),
        ("template", "x" * 300, "unknown template"),
    ],
)
def test_what_cannot_be_planned(site: Site, name: str, value: Any, what: str) -> None:
    asked = {"nodes": "2", "gpus": 4, name: value}
    with pytest.raises(UserError, match=re.escape(what)) as caught:
        site.plan(flags(*asked.items()))
    assert caught.value.where


def directives(site: Site, *pairs: tuple[str, Any]) -> dict[str, Any]:
    return dict(site.plan(flags(*pairs)).directives(RunDir("/runs/50%/toy-1")))


def test_the_map_and_the_folder_are_options_of_sbatch(site: Site) -> None:
    options = directives(site, ("nodes", "1-2"), ("gpus", 4), ("slurm.qos", "high"))
    assert str(options["nodes"]) == "1-2"
    assert (options["ntasks-per-node"], options["gpus-per-node"]) == (4, "4")
    assert options["job-name"] == "toy-1"
    assert options["output"] == "/tmp/hpcddp-toy-1-%j.log"  # the run's folder may be away
    assert options["chdir"] == site.folder
    assert options["qos"] == "high"


def test_a_persons_own_log_stays(site: Site) -> None:
    assert directives(site, ("slurm.output", "logs/%j.out"))["output"] == "logs/%j.out"


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
    options = directives(site, ("cluster", "mine"), ("gpus", 4))
    assert options.get(option) == value


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
    kinds = ("gpu*", 64, "gpu:8"), ("gpu*", 32, "gpu:4"), ("cpu", 12, "(null)")
    site.program("sinfo", nodes(*kinds))
    assert site.plan(flags(("gpus", 4))).cpus_per_task == 8
    assert site.plan(flags(("gpus", 4), ("slurm.partition", "cpu"))).cpus_per_task == 3
    assert site.plan(flags(("slurm.cpus-per-task", 5))).cpus_per_task == 5
    site.profile("mine", "cpus_per_gpu = 6")
    assert site.plan(flags(("cluster", "mine"))).cpus_per_task == 6
    site.program("sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert site.plan().cpus_per_task == 1


def test_one_process_that_drives_all_gpus_has_their_cpus(site: Site) -> None:
    site.program("scontrol", "exit 0")
    site.program("sinfo", nodes(("gpu*", 32, "gpu:4")))
    dp = (("strategy", "dp"), ("gpus", 4))
    assert site.plan(flags(*dp)).cpus_per_task == 32
    assert site.plan(flags(*dp, ("slurm.cpus-per-task", 5))).cpus_per_task == 5
    site.profile("mine", "cpus_per_gpu = 6")
    assert site.plan(flags(*dp, ("cluster", "mine"))).cpus_per_task == 24
    here = site.plan(flags(*dp, ("cluster", "local")))
    assert here.cpus_per_task == len(os.sched_getaffinity(0))


def test_one_process_that_drives_all_gpus_is_one_rank_with_all_devices(site: Site) -> None:
    plan = site.plan(flags(("strategy", "dp"), ("gpus", 4), ("global_batch", 7)))
    options = dict(plan.directives(RunDir("/runs/toy-1")))
    assert (options["ntasks-per-node"], options["gpus-per-node"]) == (1, "4")
    job = plan.record(RunDir("/runs/toy-1"))
    assert (job.gpus_per_node, job.ranks_per_node, job.world_size) == (4, 1, 1)
    assert plan.topology.world_size == plan.layout.world_size == 1
    site.profile("small", "gpus_per_node = 3")
    with pytest.raises(ClusterError, match="4 GPUs per node"):
        site.plan(flags(("strategy", "dp"), ("gpus", 4), ("cluster", "small")))


def test_threads_follow_the_cpus_and_a_user_may_say_otherwise(site: Site) -> None:
    site.profile("mine", "cpus_per_gpu = 6\ninterface = 'ib0'\n[env]\nDEBUG = true")
    environ = site.plan(flags(("cluster", "mine"))).environment()
    assert environ["OMP_NUM_THREADS"] == "6"
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert environ["DEBUG"] == "true"
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


def test_a_plan_is_whole_and_what_was_asked_stays(site: Site) -> None:
    layer = flags(("name", "toy"), ("start_from", "w.pt"), ("slurm.no-requeue", True))
    layer.put("cluster", "local", "--cluster")
    asked = Asked.read([layer], [], {})
    site.write("w.pt", "")
    made = plan.make(asked, environ={}, folder=site.folder)
    assert made.spec.start_from == f"{site.folder}/w.pt" and not made.spec.requeue.enabled
    assert asked.spec.start_from == "w.pt" and asked.spec.requeue.enabled
    with pytest.raises(FrozenInstanceError):
        made.measured = Measured(1.0, 2.0, 3.0)  # type: ignore[misc]


def test_the_current_folder_is_where_the_job_works(site: Site) -> None:
    assert site.plan().workdir == site.folder == Path.cwd()


def test_where_slurm_was_not_found_a_start_says_so(site: Site) -> None:
    """`config` and `plan` start nothing, and so print no such note."""
    size = (("nodes", "2"), ("gpus", 4))
    made = site.plan(flags(("cluster", "auto"), *size))
    assert made.start_note == "Slurm not found; running 8 ranks on this machine"
    assert made.notes == ()
    one = site.plan(flags(("cluster", "auto"))).start_note
    assert one.startswith("Slurm not found; running 1 rank on")
    assert site.plan(flags(("cluster", "local"), *size)).start_note == ""
