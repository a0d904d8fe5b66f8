from collections.abc import Callable

import pytest
from sites import Outcome, Site, flags

from hpcddp.errors import UserError
from hpcddp.planning import gpu_request
from hpcddp.planning.clusters import Cluster
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir
from hpcddp.slurm.node_kinds import Gpus, NodeKind
from hpcddp.spec import JobSpec

A100 = NodeKind("gpu", False, 2, 64, 2, 250_000, (Gpus("a100", 4),), (), "g[1-2]", {"idle": 2})
NAMED = NodeKind("batch", False, 2, 64, 2, 250_000, (), ("v100", "gpu"), "n[1-2]", {"idle": 2})


def options(plan: Plan) -> dict[str, str]:
    return {name: str(value) for name, value in plan.directives(RunDir("/runs/toy-1"))}


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [("gpus-per-node", "gpus-per-node", "h100:4"), ("gres", "gres", "gpu:h100:4")],
)
def test_the_type_of_the_job_replaces_that_of_the_cluster(
    site: Site, option: str, name: str, value: str
) -> None:
    site.profile("mine", f"gpu_option = '{option}'\ngpu_type = 'a100'")
    mine = ("cluster", "mine"), ("gpus", 4)
    assert options(site.plan(flags(*mine)))[name] == value.replace("h100", "a100")
    assert options(site.plan(flags(*mine, ("gpu_type", "h100"))))[name] == value


def test_the_total_is_divided_over_the_nodes(site: Site) -> None:
    plan = site.plan(flags(("nodes", 3), ("total_gpus", 12)))
    assert (plan.gpus, options(plan)["gpus-per-node"]) == (4, "4")
    assert (plan.spec.gpus, plan.spec.total_gpus) == (4, 0)  # a resume may change the nodes


@pytest.mark.parametrize(
    ("nodes", "total", "words"),
    [
        (2, 7, "7 GPUs in all do not divide over 2 nodes"),
        (4, 3, "3 GPUs in all do not divide over 4 nodes"),
        ("1-2", 4, "4 GPUs in all cannot be divided over 1-2 nodes"),
    ],
)
def test_a_total_that_nodes_do_not_divide_is_refused(
    site: Site, nodes: object, total: int, words: str
) -> None:
    with pytest.raises(UserError) as refused:
        site.plan(flags(("nodes", nodes), ("total_gpus", total), where="-G"))
    assert refused.value.what == words and refused.value.where == "-G" and refused.value.hint


def test_ranks_on_cpus_see_no_gpu(site: Site) -> None:
    plan = site.plan(flags(("gpus", 3), ("device", "cpu")))
    assert "gpus-per-node" not in options(plan) and options(plan)["ntasks-per-node"] == "3"
    environ = plan.environment()
    assert environ["CUDA_VISIBLE_DEVICES"] == environ["HIP_VISIBLE_DEVICES"] == ""


def test_own_requests_pass_where_hpcddp_makes_none(site: Site) -> None:
    site.profile("mine", "gpu_option = 'none'")
    wanted = flags(("cluster", "mine"), ("slurm.gres", "gpu:tesla:2"))
    assert options(site.plan(wanted))["gres"] == "gpu:tesla:2"
    with pytest.raises(UserError, match="conflicts with the options of hpcddp"):
        site.plan(flags(("slurm.gres", "gpu:tesla:2")))


@pytest.mark.parametrize(
    ("job", "kind", "words"),
    [
        (JobSpec(), A100, "partition gpu has GPUs, but the job requests none: the profile has"),
        (JobSpec(gpu_type="v100"), NAMED, "GPU type v100 is not requested: the profile has"),
        (JobSpec(gpu_type="v100", slurm={"constraint": "v100&ib"}), NAMED, ""),
        (JobSpec(slurm={"gres": "gpu:a100:4"}), A100, ""),
        (JobSpec(device="cpu"), A100, ""),
        (JobSpec(), NAMED, ""),
    ],
)  # fmt: skip
def test_a_note_names_gpus_that_the_profile_does_not_request(
    job: JobSpec, kind: NodeKind, words: str
) -> None:
    made = gpu_request.of(job, Cluster(gpu_option="none"), 4, [kind])
    assert not made.option and made.note.startswith(words) and bool(made.note) == bool(words)


def test_nodes_whose_gpu_a_feature_names_are_not_cpu_nodes() -> None:
    plain = gpu_request.of(JobSpec(), Cluster(), 4, [NAMED])
    assert plain.note == "partition batch has no GPUs: 4 processes per node run on CPUs"
    assert not gpu_request.of(JobSpec(slurm={"constraint": "v100"}), Cluster(), 4, [NAMED]).note


@pytest.fixture
def line(site: Site, hpcddp: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """A dry run on a Slurm, with options."""
    site.slurm(scontrol="exit 0")
    return lambda *words: hpcddp("submit", "toy", "--dry-run", "--cluster", "slurm", *words)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--gpus", "h100:2"], ["gpus-per-node=h100:2", "ntasks-per-node=2"]),
        (["-N", "2", "-G", "h100:4"], ["gpus-per-node=h100:2", "ntasks-per-node=2"]),
        (["-N", "2", "--total-gpus", "4"], ["gpus-per-node=2", "nodes=2"]),
        (["--procs", "3"], ["ntasks-per-node=3"]),
        (["--mem", "64G", "-C", "a100&ib"], ["mem=64G", "constraint=a100&ib"]),
    ],
)
def test_sizes_as_slurm_writes_them(
    line: Callable[..., Outcome], words: list[str], lines: list[str]
) -> None:
    done = line(*words)
    assert done.code == 0, done.text
    assert all(f"#SBATCH --{each}\n" in done.out for each in lines), done.out
    assert ("gpus" in done.out.partition("set -")[0]) == ("--procs" not in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "2", "--procs", "2"], "--gpus: conflicts with --procs"),
        (["--gpus", "2", "-G", "2"], "--gpus: conflicts with --total-gpus"),
        (["-G", "0"], "must be at least 1"),
        (["--gpus", "a100:x"], "gpus is 'x', but must be a whole number"),
        (["--gpus", "a100:"], "gpus is '', but must be a whole number"),
        (["-N", "2", "-G", "3"], "3 GPUs in all do not divide over 2 nodes"),
    ],
)
def test_a_size_that_cannot_be_is_refused(
    line: Callable[..., Outcome], words: list[str], message: str
) -> None:
    done = line(*words)
    assert done.code == 2 and message in done.err


def test_gpus_replace_the_cpus_of_the_job_file(site: Site, line: Callable[..., Outcome]) -> None:
    site.job("toy", "global_batch = 96\nepochs = 1\ndevice = 'cpu'\ngpus = 2\n")
    assert "--gpus-per-node" not in line().out
    assert "--gpus-per-node=2\n" in line("--gpus", "2").out


def test_an_option_replaces_the_size_of_the_job_file(
    site: Site, line: Callable[..., Outcome]
) -> None:
    site.job("toy", "global_batch = 96\nepochs = 1\ntotal_gpus = 8\nnodes = 2\n")
    assert "--gpus-per-node=4\n" in line().out
    assert "--gpus-per-node=2\n" in line("--gpus", "2").out
    site.job("toy", "global_batch = 96\nepochs = 1\ngpus = 8\nnodes = 2\n")
    assert "--gpus-per-node=3\n" in line("-G", "6").out
    site.job("toy", "global_batch = 96\nepochs = 1\ngpus = 8\ntotal_gpus = 8\n")
    assert "gpus is 8 and total_gpus is 8: only one of them can be set" in line().err
