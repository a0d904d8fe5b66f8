"""Runs that have much to report."""

import json
from pathlib import Path
from typing import Any

from made import made_run

from hpcddp.observe.run_facts import static
from hpcddp.observe.viewer import Viewer
from hpcddp.rundir import RunDir

EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028&amp;"


def looked(run: RunDir) -> dict[str, Any]:
    return Viewer(run).look().to_dict() | static(run)


def spiky_run(folder: Path) -> RunDir:
    """A long run: of ten points of the loss nine are 1 and one is 11; the speed falls at times."""
    run = made_run(folder, "spiky", ends=(), steps=3000, slow=None)
    lines = [json.loads(line) for line in run.attempt(1).metrics.read_text().splitlines()]
    for told in lines:
        if told["event"] == "train":
            told["loss"] = 11.0 if told["step"] % 10 == 5 else 1.0
            told["samples_per_s"] = 4.0 if told["step"] % 3 == 0 else 64.0
    run.attempt(1).metrics.write_text("".join(json.dumps(told) + "\n" for told in lines))
    return run


def many_attempts(folder: Path, count: int = 100) -> RunDir:
    """A run that was interrupted each 20 steps, and had saved 10 steps before."""
    why = ["crashed", *["preempted"] * (count - 2)]
    ends = tuple((20 + 10 * i, 10 + 10 * i, cause) for i, cause in enumerate(why))
    return made_run(folder, "torn", ends=ends, steps=10 * count + 10, slow=None)
