"""What a run writes down while it trains."""

import json
import time

from made import STEP_S

from hpcddp.rundir import RunDir


def append(run: RunDir, step: int, **values: object) -> None:
    """What rank 0 writes at a step."""
    attempt = run.all_attempts()[-1]
    told = {"event": "train", "attempt": attempt.number, "time": time.time(), "step": step}
    told |= {"epoch": 3, "loss": 0.125, "lr": 1e-3, "samples_per_s": 77.0, "step_s": STEP_S}
    with attempt.metrics.open("a") as f:
        f.write(json.dumps(told | values) + "\n")
