"""Run folders as a training leaves them, made in an instant: for what shows runs."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sites import record_run

from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import STEP, RunDir, write_json

BEGAN = 1_790_000_000.0  # seconds since the epoch
STEP_S = 0.5
EPOCH = 100  # steps


def made_run(
    folder: Path,
    name: str = "pets-20261121-0253-a1b2",
    *,
    ends: tuple[tuple[int, int, str], ...] = ((120, 120, "preempted"), (260, 250, "preempted")),
    steps: int = 400,
    last: int = 0,
    cause: str | None = "done",
    slow: int | None = 2,
    ranks: int = 4,
    **spec: Any,
) -> RunDir:
    """A run of ranks on nodes of two, over several attempts.

    Args:
        ends: of each attempt but the last: the step it came to, the step it saved, and why.
        last: step that the last attempt came to; all of them where it is 0.
        cause: why the last attempt ended; None while it works.
        slow: the rank that is slow from step 200 on.
    """
    run = RunDir(folder / name)
    run.create()
    nodes = ranks // 2
    made = {"name": "pets", "task": "resnet.py", "global_batch": 32, "max_steps": steps, **spec}
    record_run(run, (nodes, nodes), 2, spec=made, created=BEGAN - 30)
    write_json(run.submission, {"job_id": "17", "submitted": BEGAN - 30})
    run.script.write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python -m hpcddp.worker\n")
    write_json(run.versions, {"python": "3.11.7", "torch": "2.13.0"})
    began, first = BEGAN, 0
    plan = [*ends, (last or steps, last or steps, cause)]
    for number, (step, saved, why) in enumerate(plan, 1):
        attempt = run.attempt(number)
        attempt.path.mkdir()
        ended = began + 10 + (step - first) * STEP_S
        facts = Attempt(
            number, "17", "n1", 1, "1", True, "n[1-2]", began, checkpoint=first,
            ended=ended if why else None, exit_code=0, cause=why, saved=saved,
            action="" if why in (None, "done") else "requeued",
        )  # fmt: skip
        write_json(attempt.facts, asdict(facts))
        attempt.log.write_text(f"0: step {first}\n1: <b>rank 1</b> says &amp;\n0: step {step}\n")
        attempt.step.write_bytes(STEP.pack(step, ended))
        _metrics(
            attempt.metrics, attempt.ranks, number, began + 10, first, step, steps, ranks, slow
        )
        first, began = saved, ended + 45
    run.log.symlink_to(f"attempts/{len(plan)}/log")
    return run


def _metrics(
    metrics: Path, own: Path, number: int, began: float, first: int, last: int, total: int,
    ranks: int, slow: int | None,
) -> None:  # fmt: skip
    lines: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []

    def tell(event: str, step: int, **values: Any) -> None:
        when = began + (step - first) * STEP_S
        lines.append({"event": event, "attempt": number, "time": when, "step": step, **values})

    table = [
        {"rank": r, "node": r // 2, "local": r % 2, "host": f"n{r // 2 + 1}", "device": "cpu",
         "cpus": 2} for r in range(ranks)
    ]  # fmt: skip
    lines.append({"event": "ranks", "attempt": number, "time": began, "backend": "gloo",
                  "ranks": table})  # fmt: skip
    resumed = f"checkpoints/step-{first}" if first else None
    tell("start", first, epoch=first // EPOCH, total_steps=total, steps_per_epoch=EPOCH,
         micro_batch=8, accumulation=1, global_batch=32, strategy="ddp", resumed=resumed,
         seed=0)  # fmt: skip
    for step in range(first + 1, last + 1):
        behind = step > 200 and slow is not None
        loss = 2.0 * math.exp(-step / 150) + 0.02 * math.sin(step)
        tell("train", step, epoch=step // EPOCH, loss=loss, lr=1e-3 * (1 - step / (total + 1)),
             samples_per_s=64.0 - 20 * behind, step_s=STEP_S, wait_s=0.01)  # fmt: skip
        busy = [0.4 if behind and r == slow else 0.2 + 0.005 * r for r in range(ranks)]
        figures.append({"step": step, "time": lines[-1]["time"], "step_s": [STEP_S] * ranks,
                        "wait_s": [0.01] * ranks, "busy_s": busy,
                        "samples_per_s": [16.0] * ranks, "memory": [3.5e8] * ranks,
                        "gpu": [None] * ranks})  # fmt: skip
        if step == max(203, first + 3) and slow is not None:
            tell(
                "slow",
                step,
                rank=slow,
                host=f"n{slow // 2 + 1}",
                what="compute",
                ratio=1.9,
                since=step - 2,
                since_time=lines[-1]["time"] - 1,
                own_s=0.4,
                median_s=0.21,
            )
        if step % EPOCH == 0:
            tell(
                "eval", step, epoch=step // EPOCH, metrics={"loss": loss, "accuracy": step / total}
            )
            tell("checkpoint", step, path=f"checkpoints/step-{step}", bytes=4e7, seconds=0.4)
    if last == total:
        tell("end", last, outcome="done", saved=last, seed=0, metrics={"accuracy": 1.0},
             counted={}, count=80)  # fmt: skip
    metrics.write_text("".join(json.dumps(x) + "\n" for x in lines))
    own.write_text("".join(json.dumps(x) + "\n" for x in figures))
