from collections.abc import Callable

import pytest
import recorded
from sites import Site

from hpcddp.planning.site import choices, detection, verdicts
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.planning.site.verdicts import Verdict

Answer = tuple[bool, str]


@pytest.fixture
def facts(site: Site) -> SiteFacts:
    recorded.install(site, "plain")
    return detection.read()


def tried(facts: SiteFacts, answer: Callable[[str], Answer]) -> list[Verdict]:
    return verdicts.run(facts, choices.of(facts), answer)


def values(facts: SiteFacts, rows: list[Verdict]) -> dict[str, object]:
    found = verdicts.applied(choices.of(facts), rows)
    return {row.key.removeprefix("slurm."): row.value for row in found if "slurm." in row.key}


def test_a_guess_that_is_accepted_needs_one_trial(facts: SiteFacts) -> None:
    (only,) = tried(facts, lambda script: (True, "Job 9 to start"))
    assert str(only) == (
        "--partition=gpu --account=vision --qos=gpu --gpus-per-node=a100:1: accepted"
    )
    assert values(facts, [only]) == {"partition": "gpu", "account": "vision", "qos": "gpu"}
    script = only.request.script()
    assert script.startswith("#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --partition=gpu\n")


def test_what_slurm_names_is_added_first(facts: SiteFacts) -> None:
    def answer(script: str) -> Answer:
        return "--time=" in script, "sbatch: error: a job needs a time limit"

    first, second = tried(facts, answer)
    assert not first.accepted and second.accepted and "--time=1:00:00" in str(second)
    rows = verdicts.applied(choices.of(facts), [first, second])
    (time,) = [row for row in rows if row.key == "slurm.time"]
    assert "sbatch refused a job without it" in time.comment and "time limit" in time.comment


def test_where_a_plugin_chooses_the_partition_none_is_named(facts: SiteFacts) -> None:
    facts.config["JobSubmitPlugins"] = "lua"
    rows = tried(facts, lambda script: ("--partition" not in script, "no partition, please"))
    assert len(rows) == 1 and "partition" not in values(facts, rows)
    rows = tried(facts, lambda script: ("--partition=gpu" in script, "no nodes"))
    assert len(rows) == 2 and values(facts, rows)["partition"] == "gpu"


def test_it_gives_up_after_four_and_keeps_the_guesses(facts: SiteFacts) -> None:
    rows = tried(facts, lambda script: (False, "time constraint account qos partition"))
    assert 1 < len(rows) <= verdicts.MOST
    assert len({row.request for row in rows}) == len(rows)
    assert values(facts, rows) == {"partition": "gpu", "account": "vision", "qos": "gpu"}


def test_words_of_slurm_fit_a_comment(facts: SiteFacts) -> None:
    (row, *_) = tried(facts, lambda script: (False, "a\x1b[1m\n" + 400 * "b "))
    assert row.said.isprintable() and len(row.said) <= verdicts.LONGEST
