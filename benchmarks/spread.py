"""The step of each strategy beside a minimal loop of the same strategy in plain torch, on 2 ranks.

Both sides run in turn in the same two processes on this machine, with the model and the data of
jobs/charlm. A measurement is a training from its start, timed after optimizer steps of rank 0. Our
side is a normal run with its loader, records and votes. The loop slices its data from memory and
does nothing else.

Memory is the size of live tensors on the rank that has most: all parameters between two steps under
fsdp, the optimizer state under zero1. Its floor is one rank's share of the whole. Sent bytes are
counted by the kernel, per process and step. Their floor sends whole gradients.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp.attempt.rendezvous import free_port
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir

LIMIT = 1.05
SHARE_LIMIT = 1.1
SENT_LIMIT = 0.52
STEP_LEAST = 0.05  # seconds: the limit does not apply to shorter steps
RANKS = 2
WARM_UP, STEPS = 5, 20
STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "pp")
HOOKS = ("fp16", "bf16")
WIDTH, LAYERS, BATCH = 128, 4, 32
KEYS = {
    "model.width": WIDTH,
    "model.layers": LAYERS,
    "global_batch": BATCH,
    "epochs": 0,
    "max_steps": WARM_UP + STEPS,
    "checkpoint.every": 0,
    "train.eval_every": 0,
    "train.clip_norm": 0,
}
LOOP = str(Path(__file__).with_name("spread_loop.py"))
Found = dict[str, list[dict[str, Any]]]
"""The figures of each measurement for "ours" and "floor"; see spread_loop.py."""


def rows(site: Site) -> Iterator[Row]:
    found: dict[str, Found] = {}
    for strategy in STRATEGIES:
        _tell(f"spread {strategy}")
        found[strategy] = _takes(site, strategy, site.pairs)
        ours, floor = ([take["step"] for take in found[strategy][who]] for who in ("ours", "floor"))
        if median(floor) < STEP_LEAST:
            raise HpcddpError(
                f"steps of {strategy} are too short: {median(floor):.3f} s, expected {STEP_LEAST} s"
            )
        yield Row(f"spread {strategy}", ours, floor, ratio_limit=LIMIT)
    for strategy, what in (("fsdp", "parameters"), ("zero1", "optimizer")):
        held = [take[what] for take in found[strategy]["ours"]]
        whole = [take[what] for take in found["ddp"]["ours"]]
        yield Row(f"{strategy} {what}", held, [size / RANKS for size in whole], "B", SHARE_LIMIT)
    for hook in HOOKS:
        _tell(f"spread {hook}")
        sent = _takes(site, "ddp", 0, {"ddp.hook": hook})["ours"][0]["sent"]
        whole = found["ddp"]["ours"][0]["sent"]
        yield Row(f"spread {hook} sent", [sent], [whole], "B", ratio_limit=SENT_LIMIT)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _takes(site: Site, strategy: str, pairs: int, more: dict[str, Any] | None = None) -> Found:
    """Measure both sides in turn, without the first pair. With 0 pairs: one measurement of ours."""
    folder = site.fresh()
    keys = {**KEYS, **(more or {})}
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    shape = ["--cluster", "local", "--nodes", "1", "--gpus", str(RANKS), "--strategy", strategy]
    output([HPCDDP, "render", "charlm", *shape, *words], site.environ, folder)
    (made,) = (folder / "runs").iterdir()
    runs = [RunDir(folder / f"take-{number}") for number in range(pairs + 1)]
    for run in runs:
        run.create()
        shutil.copy(RunDir(made).job, run.job)
    environ = site.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    loop = [PYTHON, "-P", LOOP, str(folder / "figures"), strategy, str(WARM_UP)]
    command = [PYTHON, "-P", "-m", "hpcddp.launch.spawn", "1", str(RANKS), *loop]
    output([*command, *(str(run.path) for run in runs)], environ, folder)
    found: Found = json.loads((folder / "figures").read_text())
    return found if pairs == 0 else {who: takes[1:] for who, takes in found.items()}
