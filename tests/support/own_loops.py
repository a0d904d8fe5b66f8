"""A person's own loop on a run, preempted and not."""

import json
import re
import sys
from collections import Counter

from local_runs import Command, until
from sites import SUPPORT, Site

from hpcddp.attempt import ledger
from hpcddp.observe import history
from hpcddp.rundir import RunDir
from hpcddp.sandbox import compare

SCRIPT = str(SUPPORT / "loop_script.py")

TRACE = ("--set", "train.trace=true")

SIZE = ("--nodes", "1", "--gpus", "2")


def start(
    command: Command,
    *words: str,
    size: tuple[str, ...] = SIZE,
    script: str = SCRIPT,
    at: tuple[int, ...] = (),
    stop: str = "",
) -> None:
    """Submit a script that has itself preempted at some steps, or stopped at one."""
    more = ("--env", "PREEMPT_AT=" + ",".join(map(str, at)), "--env", f"STOP_AT={stop}", "--detach")
    done = command("submit", *size, *TRACE, *more, "--", sys.executable, script, *words)
    assert done.code == 0, done.text


def both(
    site: Site, command: Command, script: str, *words: str, at: tuple[int, ...]
) -> tuple[RunDir, RunDir]:
    """A run that nothing disturbs, and one that is preempted at some steps: as far as anybody can
    tell from outside they did the same, each batch once."""
    start(command, *words, "0", script=script)
    until(command, lambda s: s["state"] == "COMPLETED")
    start(command, *words, "0.1", script=script, at=at)
    until(command, lambda s: s["state"] == "COMPLETED")
    reference, run = runs(site)
    assert [a.cause for a in ledger.attempts(run)] == [*["preempted"] * len(at), "done"]
    assert sum(row.lost for row in history.summaries(run)) == sum(compare.lost(run).values()) == 0
    assert compare.digest(run) == compare.digest(reference) != ""
    assert said(run, "took") == said(reference, "took")
    assert set(said(run, "took").values()) == {1}
    return reference, run


def said(run: RunDir, word: str) -> Counter[str]:
    """The lines of all attempts' logs from a word on."""
    logs = "".join(attempt.log.read_text() for attempt in run.all_attempts())
    return Counter(re.findall(rf"\b{word} .*", logs))


def used(run: RunDir) -> Counter[int]:
    """How often each sample was trained on, as the script of the Trainer prints them."""
    batches = (re.search(r"\[.*\]", line) for line in said(run, "took").elements())
    return Counter(sample for batch in batches if batch for sample in json.loads(batch[0]))


def runs(site: Site) -> list[RunDir]:
    """Oldest first."""
    return [RunDir(p) for p in sorted(site.runs.glob("*-*"), key=lambda p: p.stat().st_ctime)]
