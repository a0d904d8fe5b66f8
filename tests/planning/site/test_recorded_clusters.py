"""Each recorded cluster: its profile requests what the documentation of its site shows."""

import re
from collections.abc import Callable

import pytest
import recorded
from sites import Outcome, Site

CALLS = 8  # of Slurm's programs, besides the trials
TRIALS = 4
# What a request is made of. Slurm takes the GPUs of a node from either option.
PARTS = ("partition", "account", "qos", "constraint", "time", "gpus")
# The request of a site's page -> where its profile may differ, and why.
OTHER = {
    # The default account serves as well.
    "perlmutter": {"account"}, "juwels-booster": {"account"}, "cpu-only": {"account", "time"},
    "constraint-only": {"account", "partition"},
    # The same nodes are in two partitions.
    "multi-cluster": {"account", "partition"},
    # The page's example of one partition; the default one needs no name.
    "cloud": {"partition"},
}  # fmt: skip


def request(lines: list[str]) -> dict[str, str]:
    """The parts of a request: options with their values."""
    options = dict(line.removeprefix("--").partition("=")[::2] for line in lines)
    gpus = options.get("gpus-per-node") or options.get("gres", "").removeprefix("gpu:")
    return {name: options[name] for name in PARTS if name in options} | {"gpus": gpus}


@pytest.mark.parametrize("name", [n for n in recorded.names() if n != "plain"])
def test_the_profile_requests_what_the_site_documents(
    site: Site, hpcddp: Callable[..., Outcome], name: str
) -> None:
    recorded.install(site, name)
    detected = hpcddp("cluster", "detect")
    assert detected.code == 0, detected.err
    calls = recorded.calls(site)
    assert len(calls) <= CALLS and detected.out.count("\ntried ") <= TRIALS
    documented = request((recorded.CLUSTERS / name / "request").read_text().split())
    gpus = re.sub(r".*:", "", documented["gpus"])
    size = ["--gpus", gpus] if gpus else []
    done = hpcddp("submit", "toy", "--set", "global_batch=512", "--dry-run", "-N", "2", *size)
    assert done.code == 0, done.err
    rendered = request(re.findall(r"^#SBATCH (.*)$", done.out, re.MULTILINE))
    may = OTHER.get(name, set())
    ours, theirs = _bare(rendered, documented), _bare(documented, rendered)
    assert {k: v for k, v in ours.items() if k not in may} == {
        k: v for k, v in theirs.items() if k not in may
    }


def _bare(one: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    """A request without the type of its GPUs, where the other has none."""
    gpus = one["gpus"] if ":" in other["gpus"] else re.sub(r".*:", "", one["gpus"])
    return one | {"gpus": gpus}
