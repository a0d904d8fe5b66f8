"""The time limit that a rehearsal gives one attempt of its job."""

import os
import subprocess
from pathlib import Path

import pytest

from hpcddp.attempt import ledger
from hpcddp.sandbox import time_limits


@pytest.mark.parametrize(
    ("left", "end"), [(None, 0.0), (time_limits.USUAL_SECONDS, 0.0), (60.0, 1060.0)]
)
def test_only_a_limit_of_its_own_has_a_deadline(left: float | None, end: float) -> None:
    facts = ledger.new_attempt("1", 1)
    facts.began = 1000.0
    facts.deadline = None if left is None else facts.began + left
    assert time_limits.deadline(facts) == end


def test_the_prolog_sets_one_limit_even_if_slurm_refuses_at_first(tmp_path: Path) -> None:
    asked, scontrol, prolog = tmp_path / "asked", tmp_path / "scontrol", tmp_path / "prolog"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n[ "$(wc -l < {asked})" -ge 3 ]\n')
    scontrol.chmod(0o755)
    prolog.write_text(time_limits.PROLOG.format(folder=tmp_path, scontrol=scontrol))
    time_limits.limit_next(tmp_path, 61.7)
    job = {**os.environ, "SLURM_JOB_PARTITION": "low", "SLURM_JOB_ID": "17"}
    for _ in range(2):  # the next attempt has no limit of its own
        subprocess.run(["sh", str(prolog)], env=job, check=True)
    assert asked.read_text().splitlines() == ["update JobId=17 EndTime=now+62"] * 3


def test_a_restart_in_place_gets_the_limit_that_waits_for_a_prolog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, scontrol = tmp_path / "asked", tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    time_limits.limit_next(tmp_path, 20.0)
    for _ in range(2):  # the next attempt has no limit of its own
        time_limits.limit_now(tmp_path, "17")
    assert asked.read_text().splitlines() == ["update JobId=17 EndTime=now+30"]
