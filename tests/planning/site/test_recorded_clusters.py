"""Each recorded cluster: its profile requests what the documentation of its site shows."""

import re
import tomllib
from collections.abc import Callable

import pytest
import recorded
from sites import Outcome, Site

CALLS = 8  # of Slurm's programs, besides the trials
TRIALS = 4
# What a request is made of, besides its GPUs and the option for them.
PARTS = ("clusters", "partition", "account", "qos", "constraint", "time")
# Of several clusters, the one that is asked for.
ELSEWHERE = {"multi-cluster": "wice"}
# What else the documentation of a site gives.
VALUES = {
    "juwels-booster": {"host_suffix": "i"},
    "lumi-g": {"cpus_per_gpu": 14},  # threads: 7 of the 8 cores of each GPU's part are for jobs
    "grace-hopper": {"cpus_per_gpu": 72},
    "mig": {"gpu_type": "a100", "cpus_per_gpu": 12},
    "multi-cluster": {"cpus_per_gpu": 18},
}  # fmt: skip
# The request of a site's page -> where its profile may differ, and why.
OTHER = {
    # The default account serves as well.
    "perlmutter": {"account"}, "constraint-only": {"account", "partition"},
    # A trial's time limit is a guess.
    "cpu-only": {"time"},
    # The same nodes are in two partitions.
    "multi-cluster": {"partition"},
    # The site accepts either option for GPUs.
    "grace-hopper": {"option"}, "lab": {"option"},
    # The page's example of one partition; the default one needs no name.
    "cloud": {"partition"},
}  # fmt: skip


def request(lines: list[str]) -> dict[str, str]:
    """The parts of a request: options with their values."""
    options = dict(line.removeprefix("--").partition("=")[::2] for line in lines)
    option = next((name for name in ("gpus-per-node", "gres") if name in options), "")
    gpus = {"option": option, "gpus": options.get(option, "").removeprefix("gpu:")}
    return {name: options[name] for name in PARTS if name in options} | gpus


@pytest.mark.parametrize("name", [n for n in recorded.names() if n != "plain"])
def test_the_profile_requests_what_the_site_documents(
    site: Site, hpcddp: Callable[..., Outcome], name: str
) -> None:
    recorded.install(site, name)
    other = ELSEWHERE.get(name)
    detected = hpcddp("cluster", "detect", *(["-M", other] if other else []))
    assert detected.code == 0, detected.err
    calls = recorded.calls(site)
    assert len(calls) <= CALLS and detected.out.count("\ntried ") <= TRIALS
    documented = request((recorded.CLUSTERS / name / "request").read_text().split())
    gpus = re.sub(r".*:", "", documented["gpus"])
    size = ["--gpus", gpus] if gpus else []
    size += ["--cluster", other] if other else []
    done = hpcddp("submit", "toy", "--set", "global_batch=512", "--dry-run", "-N", "2", *size)
    assert done.code == 0, done.err
    lines = re.findall(r"^#SBATCH (.*)$", done.out, re.MULTILINE)
    rendered = request(lines)
    (profile,) = (site.config / "hpcddp" / "clusters").glob("*.toml")
    values = tomllib.loads(profile.read_text())
    given = VALUES.get(name, {})
    assert given.items() <= values.items()
    assert "cpus_per_gpu" not in given or f"--cpus-per-task={given['cpus_per_gpu']}" in lines
    may = OTHER.get(name, set())
    ours, theirs = _bare(rendered, documented), _bare(documented, rendered)
    assert {k: v for k, v in ours.items() if k not in may} == {
        k: v for k, v in theirs.items() if k not in may
    }


def _bare(one: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    """A request without the type of its GPUs, where the other has none."""
    gpus = one["gpus"] if ":" in other["gpus"] else re.sub(r".*:", "", one["gpus"])
    return one | {"gpus": gpus}


def test_a_detection_without_trials_keeps_what_trials_found(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    recorded.install(site, "juwels-booster")
    assert hpcddp("cluster", "detect").code == 0
    profile = site.config / "hpcddp" / "clusters" / "juwels.toml"
    values = tomllib.loads(profile.read_text())
    assert (values["gpu_option"], values["slurm"]["account"]) == ("gres", "proj_a")
    assert "sbatch refused --gpus-per-node: Request GPUs with --gres" in profile.read_text()
    assert hpcddp("cluster", "detect", "--no-trials").code == 0
    assert tomllib.loads(profile.read_text()) == values
