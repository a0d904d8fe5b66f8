"""What is asked of a job: on which cluster, and on how many nodes and GPUs."""

import os
import re
from typing import Any

import pytest
from sites import Site, flags

from hpcddp.errors import UserError
from hpcddp.planning.asked import Asked


def ask(*pairs: tuple[str, Any], notes: tuple[str, ...] = ()) -> Asked:
    return Asked.read([flags(*pairs)], [*notes], os.environ)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("nodes", "0", "is less than 1 node"),
        ("nodes", "-1", "not a number of nodes"),
        ("nodes", "two", "not a number of nodes"),
        ("nodes", "4-1", "is reversed"),
        ("cluster", "slrum", "unknown cluster"),
    ],
)
def test_a_cluster_or_a_size_that_there_is_not(
    site: Site, name: str, value: Any, what: str
) -> None:
    with pytest.raises(UserError, match=re.escape(what)) as caught:
        ask((name, value))
    assert caught.value.where


def test_auto_is_slurm_where_sbatch_answers_and_here_elsewhere(site: Site) -> None:
    here = ask(("cluster", "auto"), notes=("one",))
    assert (here.backend, here.spec.cluster, here.profile.name) == ("local", "local", "local")
    assert here.notes == ("one",) and here.slurm_missing
    site.program("sbatch", "exit 0")
    there = ask(("cluster", "auto"))
    assert (there.backend, there.spec.cluster, there.notes) == ("slurm", "slurm", ())
    assert not there.slurm_missing and not ask(("cluster", "local")).slurm_missing


@pytest.mark.parametrize("option", ["--partition", "--account", "--time", "--qos", "--sbatch"])
def test_options_for_slurm_are_refused_where_no_slurm_is_found(site: Site, option: str) -> None:
    name = {"--sbatch": "constraint"}.get(option, option[2:])
    layer = flags((f"slurm.{name}", "5"), where=option)
    with pytest.raises(UserError, match="requires Slurm, which was not found") as caught:
        Asked.read([layer], [], os.environ)
    assert caught.value.where == option and "--cluster local" in caught.value.hint
    layer.put("cluster", "local", "--cluster")
    assert Asked.read([layer], [], os.environ).backend == "local"


def test_variables_and_job_files_for_slurm_are_ignored_without_slurm(site: Site) -> None:
    for source in ("SBATCH_PARTITION", str(site.folder / "jobs" / "toy.toml")):
        asked = Asked.read([flags(("slurm.partition", "gpu"), where=source)], [], os.environ)
        assert asked.backend == "local" and asked.slurm_missing


def test_a_profile_says_what_nobody_above_it_has_said(site: Site) -> None:
    path = site.profile("mine", "[slurm]\nqos = 'low'\ntime = '1:00:00'")
    asked = ask(("cluster", "mine"), ("slurm.qos", "high"))
    assert asked.spec.slurm == {"qos": "high", "time": "1:00:00"}
    assert asked.sources["slurm.time"] == str(path) and asked.sources["slurm.qos"] == "--set"
    assert (asked.nodes.min, asked.nodes.max, asked.gpus) == (1, 1, 1)
    assert asked.sources["nodes"] == asked.sources["gpus"] == "default"


def test_the_rules_are_those_of_the_jobs_first_partition(site: Site) -> None:
    partitions = "PartitionName=a Default=YES GraceTime=1\nPartitionName=b GraceTime=7"
    site.program("scontrol", f"case $* in *partition*) echo '{partitions}';; esac")
    for names, grace in (("b,a", 7), ("a", 1), ("", 1)):
        pairs = [("slurm.partition", names)] if names else []
        rules = ask(("cluster", "slurm"), *pairs).now().site
        assert rules and rules.grace == grace
    assert ask(("cluster", "local")).now().site is None
    site.program("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert ask(("cluster", "slurm")).now().site is None
