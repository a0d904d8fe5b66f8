"""attempts/N/metrics.jsonl: one record a line, written by rank 0 (standard library only).

Every record has event, attempt, time and, where it has one, step. ``line`` says the same to a
person; whoever shows a run on a terminal uses it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hpcddp.rundir import STEP, AttemptDir, RunDir, last_lines

if TYPE_CHECKING:
    from hpcddp.train.lease import Lease

QUICK = 5.0  # seconds: a save that failed sooner tells nothing of what one takes
TAIL = 1 << 16  # bytes of an earlier attempt's metrics that are read
OnRecord = Callable[[dict[str, Any]], None]


class Recorder:
    """Rank 0's pen. On other ranks it does nothing."""

    def __init__(
        self,
        attempt: AttemptDir,
        *,
        active: bool,
        on_record: OnRecord | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._attempt = attempt.number
        self._on_record = on_record
        self._lease = lease
        self._file: IO[bytes] | None = None
        self._step: IO[bytes] | None = None
        self._ranks: IO[bytes] | None = None
        self._torn: set[str] = set()  # files whose last line stands there in part
        if active:
            attempt.path.mkdir(parents=True, exist_ok=True)
            self._file = attempt.metrics.open("ab", buffering=0)
            self._ranks = attempt.ranks.open("ab", buffering=0)
            self._step = _opened(attempt.step)

    def __call__(self, event: str, **values: Any) -> None:
        """Write one record: who follows the run sees it at once. Print its line.

        A record that a full disk does not take is lost, and the training goes on. Nothing is
        written once the lease is lost.
        """
        if self._file is None or (self._lease and self._lease.lost):
            return
        record = {"event": event, "attempt": self._attempt, "time": time.time(), **values}
        self._write("metrics", self._file, record)
        if text := line(record):
            with contextlib.suppress(OSError):
                print(text, flush=True)
        if self._on_record is not None:
            self._on_record(record)

    def ranks(self, **values: Any) -> None:
        """One line of each rank's own figures, lists by rank."""
        if self._ranks is not None and not (self._lease and self._lease.lost):
            self._write("ranks", self._ranks, {**values, "time": time.time()})

    def took(self, step: int) -> None:
        """Note a step that was taken, in 1 to 2 microseconds; it outlives a killed process.

        A map of the file would be quicker, and end the rank by SIGBUS where the disk is full.
        """
        if self._step is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._step.fileno(), STEP.pack(step, time.time()), 0)

    def _write(self, name: str, file: IO[bytes], values: dict[str, Any]) -> None:
        """One line in one piece, below what a full disk left of an earlier one."""
        data = json.dumps(values).encode() + b"\n"
        torn = name in self._torn
        if torn:
            data = b"\n" + data
        with contextlib.suppress(OSError):
            written = file.write(data)
            self._torn.discard(name)
            if written < len(data) and (torn or written > 0):
                self._torn.add(name)

    def close(self) -> None:
        for file in (self._file, self._ranks, self._step):
            if file is not None:
                with contextlib.suppress(OSError):  # a network's disk tells here that it was full
                    file.close()
        self._file = self._ranks = self._step = None


def _opened(path: Path) -> IO[bytes] | None:
    """The file for the last step; none where it cannot be made."""
    with contextlib.suppress(OSError):
        return path.open("wb", buffering=0)
    return None


def earlier_saves(run: RunDir, attempt: int) -> list[float]:
    """Seconds of the last saves of the newest attempt before this one that tells of any; of failed
    ones those that took longer. One that the time limit cut tells nothing."""
    with contextlib.suppress(OSError):
        for folder in reversed(run.all_attempts()):
            tail = last_lines(folder.metrics, TAIL) if folder.number < attempt else []
            took = {
                event: [
                    float(r["seconds"])
                    for r in tail
                    if r.get("event") == event and isinstance(r.get("seconds"), int | float)
                ]
                for event in ("checkpoint", "checkpoint_failed")
            }
            good = took["checkpoint"]
            least = max(good, default=QUICK)
            if found := [*good, *(s for s in took["checkpoint_failed"] if s > least)]:
                return found
    return []


def line(record: Mapping[str, Any]) -> str:
    """A record for a person, or "" for one that has nothing to tell."""
    make = _LINES.get(record["event"])
    return make(record) if make else ""


COLUMNS = ("rank", "node", "local", "host", "device", "cpus")


def rank_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The map that the ranks reported, as a table."""
    rows = [COLUMNS, *(tuple(str(r[c]) for c in COLUMNS) for r in ranks)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _ranks(r: Mapping[str, Any]) -> str:
    n = len(r["ranks"])
    s = "" if n == 1 else "s"
    how = f"nccl on {n} GPU{s}" if r["backend"] == "nccl" else f"gloo on CPU, {n} rank{s}"
    return f"{rank_table(r['ranks'])}\n{how}"


def _start(r: Mapping[str, Any]) -> str:
    if "total_steps" not in r:  # a loop of a person's own
        return f"resumed from {r['resumed']}" if r["resumed"] else ""
    batch = f"global batch {r['global_batch']}"
    if r["accumulation"] > 1:
        batch += f" ({r['accumulation']} micro-batches of {r['micro_batch']} a rank)"
    text = f"{r['total_steps']} steps, {r['steps_per_epoch']} an epoch, {batch}, seed {r['seed']}"
    if r.get("workers"):
        text += f"\n{r['workers']} of {r['cpus']} CPUs read data"
    return f"{text}\nresumed from {r['resumed']}, step {r['step']}" if r["resumed"] else text


def _micro_batch(r: Mapping[str, Any]) -> str:
    tried = ", ".join(map(str, r["tried"]))
    return (
        f"micro-batches of {r['size']} fit into memory, {r['accumulation']} a step (tried {tried})"
    )


def _train(r: Mapping[str, Any]) -> str:
    rate = f"  lr {r['lr']:.3g}" if "lr" in r else ""
    norm = f"  grad norm {r['grad_norm']:.3g}" if "grad_norm" in r else ""
    return (
        f"step {r['step']}  epoch {r['epoch']}  loss {r['loss']:.4f}"
        f"{rate}{norm}  {r['samples_per_s']:.0f} samples/s"
    )


def _slow(r: Mapping[str, Any]) -> str:
    own, median = (1000 * r[name] for name in ("own_s", "median_s"))
    who = f"rank {r['rank']} on {r['host']}"
    if r["what"] == "data":
        how = f"{who} waits for its data: {own:.3g} ms a step, the others {median:.3g} ms"
    else:
        how = (
            f"{who} is slow: {own:.3g} ms of its own a step, the others {median:.3g} ms "
            f"({r['ratio']:.1f} times)"
        )
    return f"step {r['step']}  {how}, since step {r['since']}"


def _recovered(r: Mapping[str, Any]) -> str:
    how = "has its data in time" if r["what"] == "data" else "is as fast as the others"
    return f"step {r['step']}  rank {r['rank']} on {r['host']} {how} again"


def _waiting(r: Mapping[str, Any]) -> str:
    return f"step {r['step']}  {r['share']:.0%} of the time is waiting for data; {r['hint']}"


def _eval(r: Mapping[str, Any]) -> str:
    return f"step {r['step']}  epoch {r['epoch']}  eval  {_values(r)}"


def _log(r: Mapping[str, Any]) -> str:
    return f"step {r['step']}  epoch {r['epoch']}  {_values(r)}"


def _values(r: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in r["metrics"].items())


def _checkpoint(r: Mapping[str, Any]) -> str:
    return f"step {r['step']}  saved {r['path']}  {r['bytes'] / 1e6:.1f} MB in {r['seconds']:.2f} s"


def _bad(r: Mapping[str, Any]) -> str:
    loss = f"{r['loss']:.4g}" if isinstance(r["loss"], float) else r["loss"]
    return f"step {r['step']}  bad {r['what']} on rank {r['rank']} (loss {loss}): "


def _skipped(r: Mapping[str, Any]) -> str:
    return _bad(r) + "left out"


def _rollback(r: Mapping[str, Any]) -> str:
    return _bad(r) + f"back to {r['path']}"


def _diverged(r: Mapping[str, Any]) -> str:
    return _bad(r) + "the training ends, nothing is saved"


def _checkpoint_failed(r: Mapping[str, Any]) -> str:
    newest = "none is saved yet" if r["saved"] is None else f"the newest is of step {r['saved']}"
    return f"step {r['step']}  NOT saved: {r['reason']}; {newest}"


def _end(r: Mapping[str, Any]) -> str:
    at = "" if r["step"] is None else f" at step {r['step']}"
    lines = [f"{r['outcome']}{at}"]
    if r.get("saved", r["step"]) != r["step"]:
        lines.append(f"its state could not be saved: the run goes back to step {r['saved'] or 0}")
    for name, value in r.get("metrics", {}).items():
        n = r["count"]
        whole = f"{r['counted'][name]} of {n}" if name in r["counted"] else f"mean of {n}"
        lines.append(f"{name} {value:.4f} ({whole} held-out samples, seed {r['seed']})")
    return "\n".join(lines)


_LINES = {
    "ranks": _ranks,
    "start": _start,
    "micro_batch": _micro_batch,
    "train": _train,
    "slow": _slow,
    "recovered": _recovered,
    "waiting": _waiting,
    "eval": _eval,
    "log": _log,
    "checkpoint": _checkpoint,
    "skipped": _skipped,
    "rollback": _rollback,
    "diverged": _diverged,
    "checkpoint_failed": _checkpoint_failed,
    "end": _end,
}
