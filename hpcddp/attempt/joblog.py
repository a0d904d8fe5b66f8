"""The lines that hpcddp writes into a job's log, and patterns to read them.

``line`` turns a record of metrics.jsonl into a line for the log and the terminal. log_reader.py
reads the lines of other programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

STEP = re.compile(r"^step \d+  ")  # starts many lines
# A record in metrics.jsonl about a rank that became slow, or fast again.
SLOWNESS = re.compile(rb'^.*"event": ?"(?:slow|recovered)".*$', re.MULTILINE)
# The part of a line that a rank has overwritten by a carriage return, after the launcher's label.
REDRAWN = re.compile(r"^( *\d+: |).*\r(?=.)")

NEW_STEP = "new"  # the record of the first step that no earlier attempt has taken


def label(rank: int) -> re.Pattern[bytes]:
    """The pattern of the label before each line of a rank, by srun or our launchers."""
    return re.compile(rb" *0*%d: " % rank)


def labelled(rank: int, width: int, line: bytes) -> bytes:
    """A line of a rank with its label, in srun's form; ``label`` matches it."""
    return b"%*d: %b\n" % (width, rank, line)


def rank_ended(rank: int, host: str, name: str) -> str:
    """A launcher's message that a signal ended a rank; ``log_reader.BY_OURS`` reads it."""
    return f"hpcddp: rank {rank} on {host} was ended by {name}"


def line(record: Mapping[str, Any]) -> str:
    """The line of a record, or "" if it is not shown."""
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


def _preflight(r: Mapping[str, Any]) -> str:
    slowest, usual = (f"{r[name] / 1e9:.3g}" for name in ("slowest", "median"))
    text = f"preflight: {slowest} GFLOP/s on the slowest rank, {usual} on most; "
    text += f"all-reduce of 16 MiB in {r['all_reduce_s'] * 1e3:.3g} ms"
    text += f"; measured in {r['seconds']:.1f} s" if "seconds" in r else ""
    slow = "".join(f"\n{host} computes at {part:.0%} of the speed of the others"
                   for host, part in r["slow"].items())  # fmt: skip
    return text + slow


def _start(r: Mapping[str, Any]) -> str:
    if "total_steps" not in r:  # a user's own loop
        return f"resumed from {r['resumed']}" if r["resumed"] else ""
    batch = f"global batch {r['global_batch']}"
    if r["accumulation"] > 1:
        batch += f" ({r['accumulation']} micro-batches of {r['micro_batch']} per rank)"
    steps = f"{r['total_steps']} step{'s' * (r['total_steps'] != 1)}"
    text = f"{steps}, {r['steps_per_epoch']} per epoch, {batch}, seed {r['seed']}"
    if r.get("workers"):
        text += f"\n{r['workers']} of {r['cpus']} CPUs read data"
    return f"{text}\nresumed from {r['resumed']}, step {r['step']}" if r["resumed"] else text


def _micro_batch(r: Mapping[str, Any]) -> str:
    tried = ", ".join(map(str, r["tried"]))
    return f"micro-batch {r['size']} fits in memory, {r['accumulation']} per step (tried {tried})"


def _train(r: Mapping[str, Any]) -> str:
    rate = f"  lr {r['lr']:.3g}" if "lr" in r else ""
    norm = f"  grad norm {r['grad_norm']:.3g}" if "grad_norm" in r else ""
    text = f"step {r['step']}  epoch {r['epoch']}  loss {r['loss']:.4f}{rate}{norm}"
    # The first step after a start is slower than any other: its time is no rate.
    return text if r.get("first") else f"{text}  {r['samples_per_s']:.0f} samples/s"


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
    return _bad(r) + "step skipped"


def _rollback(r: Mapping[str, Any]) -> str:
    return _bad(r) + f"rolled back to {r['path']}"


def _diverged(r: Mapping[str, Any]) -> str:
    return _bad(r) + "training ends, nothing is saved"


def _checkpoint_failed(r: Mapping[str, Any]) -> str:
    newest = "no checkpoint yet" if r["saved"] is None else f"the newest is of step {r['saved']}"
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
    "preflight": _preflight,
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
