"""The memory that a job asks for."""

from collections.abc import Callable

import pytest
from sites import Outcome, Site, nodes

Command = Callable[..., Outcome]
COUNTS = "SelectType = select/cons_tres\nSelectTypeParameters = CR_CORE_MEMORY"
PARTITION = "PartitionName=gpu Default=YES State=UP {more}"


def slurm(site: Site, partition: str, config: str = COUNTS, gres: str = "gpu:4") -> None:
    """Two nodes of 32 CPUs and 64,000 MB."""
    answers = f"case \"$*\" in *config*) echo '{config}';; *) echo '{partition}';; esac"
    site.slurm(sinfo=nodes(("gpu*", 32, gres)), scontrol=answers)


def memory(done: Outcome) -> str:
    """The value of --mem in a dry run; "" for none."""
    assert done.code == 0, done.text
    lines = [line for line in done.out.splitlines() if line.startswith("#SBATCH --mem")]
    return "".join(line.removeprefix("#SBATCH --mem=") for line in lines)


@pytest.mark.parametrize(
    ("more", "words", "asked"),
    [
        ("DefMemPerCPU=1000", [], "16000M"),  # 1 of 4 GPUs
        ("DefMemPerCPU=1000", ["--gpus", "4"], "64000M"),
        ("DefMemPerCPU=2000", [], ""),  # 8 CPUs bring as much
        ("DefMemPerCPU=1000 MaxMemPerCPU=1500", [], "12000M"),
        ("DefMemPerNode=UNLIMITED", [], "16000M"),  # all of a node, of which it uses a part
        ("DefMemPerNode=UNLIMITED", ["--gpus", "4"], ""),
        ("DefMemPerNode=8000", [], ""),  # the site's own choice
        ("JobDefaults=DefMemPerGPU=9000 DefMemPerNode=UNLIMITED", [], ""),
        ("DefMemPerCPU=1000", ["--mem", "5G"], "5G"),
        ("DefMemPerCPU=1000", ["--sbatch", "mem-per-cpu=3G"], "-per-cpu=3G"),
        ("DefMemPerCPU=1000", ["--sbatch", "mem=false"], ""),
        ("DefMemPerCPU=1000", ["--procs", "2"], ""),
    ],
)
def test_a_share_of_the_node_is_asked_for(
    site: Site, hpcddp: Command, more: str, words: list[str], asked: str
) -> None:
    slurm(site, PARTITION.format(more=more))
    got = memory(hpcddp("submit", "toy", "--dry-run", *words))
    assert got.removeprefix("#SBATCH --mem") == asked


@pytest.mark.parametrize(
    "config",
    [
        "SelectType = select/cons_tres\nSelectTypeParameters = CR_CORE",
        "SelectType = select/linear\nSelectTypeParameters = CR_MEMORY",
    ],
)
def test_not_where_slurm_does_not_count_memory(site: Site, hpcddp: Command, config: str) -> None:
    slurm(site, PARTITION.format(more="DefMemPerCPU=1000"), config)
    assert memory(hpcddp("submit", "toy", "--dry-run")) == ""


def test_the_default_of_the_configuration_counts(site: Site, hpcddp: Command) -> None:
    slurm(site, PARTITION.format(more="DefMemPerNode=UNLIMITED"), COUNTS + "\nDefMemPerCPU = 100")
    assert memory(hpcddp("submit", "toy", "--dry-run", "--gpus", "4")) == "64000M"


def test_a_profile_and_a_variable_decide(
    site: Site, hpcddp: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(site, PARTITION.format(more="DefMemPerCPU=1000"))
    site.profile("mine", "[slurm]\nmem = false\n")
    job = ("submit", "toy", "--dry-run")
    assert memory(hpcddp(*job, "--cluster", "mine")) == ""
    monkeypatch.setenv("SBATCH_MEM_PER_CPU", "4G")
    assert memory(hpcddp(*job)) == ""


REFUSES = """
[ $1 = --version ] && exit
[ $1 = --test-only ] && s=$(cat) || s=$(cat $1)
[[ $s != *'SBATCH --mem='* ]] || { echo 'sbatch: error: do not ask for memory' >&2; exit 1; }
[[ $s != *'SBATCH --nice='* ]] || { echo 'sbatch: error: no nice jobs' >&2; exit 1; }
echo Submitted batch job 7
"""


def test_a_refusal_of_memory_is_a_note_with_the_options_against_it(
    site: Site, hpcddp: Command
) -> None:
    slurm(site, PARTITION.format(more="DefMemPerCPU=1000"))
    site.program("sbatch", REFUSES)
    done = hpcddp("submit", "toy", "--parsable")
    assert (done.code, done.out) == (0, "7\n")
    (note,) = [line for line in done.err.splitlines() if "--mem" in line]
    assert note.startswith("note: sbatch refused --mem, which hpcddp had added, and accepted the ")
    assert "set mem = false in [slurm] of the profile, or use --sbatch mem=false" in note
    dry = hpcddp("submit", "toy", "--dry-run")
    assert dry.code == 1 and "note: sbatch accepts the job without --mem, which hpcddp" in dry.err
    done = hpcddp("submit", "toy", "--sbatch", "mem=false")
    assert done.code == 0 and "--mem" not in done.err
    for words in (["--sbatch", "nice=5"], ["--sbatch", "mem=1G"]):  # other reasons
        other = hpcddp("submit", "toy", *words)
        assert other.code == 1 and "fix the option or the job file" in other.err


def test_check_names_the_line_for_a_site_that_refuses_memory(site: Site, hpcddp: Command) -> None:
    slurm(site, PARTITION.format(more="DefMemPerCPU=1000"))
    site.program("sbatch", REFUSES)
    profile = site.profile("mine", "cpus_per_gpu = 8\n")
    done = hpcddp("cluster", "check", "mine")
    assert done.code == 1 and "refused: do not ask for memory" in done.out
    assert "change    sbatch refuses --mem: set mem = false in [slurm] of the profile" in done.out
    profile.write_text("cpus_per_gpu = 8\n[slurm]\nmem = false\n")
    done = hpcddp("cluster", "check", str(profile))
    assert done.code == 0, done.text
    assert "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 " in done.out
