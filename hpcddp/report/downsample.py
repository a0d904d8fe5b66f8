"""The data of the page: the views of some runs, with their long parts shortened, as plain JSON.

`shown` makes it, for the page itself and for the dashboard, which sends newer data.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcddp.observe.curves import NAMES
from hpcddp.observe.history import CALM
from hpcddp.observe.series import Series, means, thin

FIGURES = 5  # significant digits
ROWS = 256  # of the map of ranks
CODE = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
EXACT = 2**53  # greater integers lose digits in a browser
LEFT = "..."  # stands for names that are left out
CAUSES = 8  # of interruptions, in words
CELL = 0.05  # step of a ratio from one character to the next

Curve = tuple[Sequence[int], Sequence[float]]  # steps and values


@dataclass(frozen=True)
class PageSize:
    """The size of each part of a run on the page.

    Args:
        points: of a curve.
        curves: their number, besides those that every training has.
        cells: of the map of ranks over time.
        text: characters of the script, and of the log.
        events: records in words.
        rows: attempts, and ranks in the table, the worst first.
        long: characters of a text in a table.
        keys: of a configuration, and of the versions.
    """

    points: int
    curves: int
    cells: int
    text: int
    events: int
    rows: int
    long: int
    keys: int


# The largest first.
SIZES = (
    PageSize(400, 24, 48_000, 24_000, 150, 64, 400, 200),
    PageSize(300, 18, 24_000, 16_000, 100, 64, 400, 200),
    PageSize(200, 12, 10_000, 8_000, 60, 48, 200, 150),
    PageSize(120, 8, 5_000, 4_000, 30, 32, 120, 100),
    PageSize(60, 4, 2_000, 2_000, 15, 16, 80, 60),
    PageSize(30, 2, 600, 800, 6, 8, 40, 30),
)


def shown(runs: Iterable[dict[str, Any]], size: PageSize = SIZES[0]) -> dict[str, Any]:
    """The page's data.

    Args:
        runs: of each run ``Viewer(run).look().to_dict() | static(run)``.
    """
    return {"schema_version": 1, "runs": [_run(run, size) for run in runs]}


def _run(run: dict[str, Any], size: PageSize) -> dict[str, Any]:
    kept = ("now", "global_batch", "steps_per_epoch", "to_go_s", "held_s", "useful_s",
            "started_s", "interruptions", "interrupted_s", "lost_steps", "lost_s", "efficiency",
            "medians")  # fmt: skip
    attempts = run["attempts"]
    heat = _heat(run["heat"], run["heat_steps"], size.cells)
    defaults = run.get("defaults", [])
    config = _table(run.get("config", {}), size, defaults)
    data = {name: run[name] for name in kept} | {
        "status": _facts(run["status"], STATUS, size.long),
        "attempts": [_attempt(attempt, size.long) for attempt in attempts[-size.rows :]],
        "earlier": max(0, len(attempts) - size.rows),
        "causes": [_cut(cause, size.long) for cause in _causes(attempts)[:CAUSES]],
        **_curves(run, size),
        "hosts": _hosts(run["ranks"], heat, size.long),
        "ranks": _ranks(run["ranks"], size),
        "heat": heat,
        "events": [
            [*event[:3], _cut(event[3], size.long), *event[4:]]
            for event in run["events"][-size.events :]
        ],
        "log": _end([_cut(line, 400) for line in run["log"]], size.text),
        "script": _begin(run.get("script", ""), size.text),
        "config": config,
        "defaults": [name for name in defaults if name in config],
        "versions": _table(run.get("versions", {}), size),
    }
    plain_data: dict[str, Any] = _plain(data)
    return plain_data


STATUS = ("run", "state", "path", "job_id", "backend", "nodes", "gpus_per_node", "created", "hosts",
          "reason", "step", "total_steps", "policy", "stale")  # fmt: skip


def _plain(data: Any) -> Any:
    """The same as JSON can hold it: NaN is null, and numbers have few digits."""
    if isinstance(data, dict):
        return {str(name): _plain(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        return rounded(data)
    return None if isinstance(data, int) and abs(data) > EXACT else data


def rounded(value: float) -> float | int | None:
    """A number with few digits; times since the epoch keep a tenth of a second."""
    if not math.isfinite(value):
        return None
    short = round(value, 1) if abs(value) > 1e8 else float(f"{value:.{FIGURES}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _cut(value: Any, size: int) -> str:
    text = str(value)
    return text if len(text) <= size else f"{text[:size]} ..."


def _facts(data: dict[str, Any], names: Sequence[str], size: int) -> dict[str, Any]:
    """Some facts out of a table, without long texts."""
    return {name: _cut(v, size) if isinstance(v := data[name], str) else v for name in names}


def _begin(text: str, size: int) -> str:
    left = len(text) - size
    return f"{text[:size]}\n... {left} more characters" if left > 0 else text


def _end(lines: list[str], size: int) -> list[str]:
    """The last lines of so many characters."""
    for i in range(len(lines) - 1, -1, -1):
        size -= len(lines[i]) + 1
        if size < 0:
            return lines[i + 1 :]
    return lines


def _table(values: dict[str, Any], size: PageSize, defaults: Sequence[str] = ()) -> dict[str, str]:
    """Values as text; where there are too many, the defaults are left out first."""
    names = sorted(values, key={*defaults}.__contains__)
    texts = {_cut(n, size.long): _cut(_value(values[n]), size.long) for n in names[: size.keys]}
    left = len(values) - size.keys
    return texts | {LEFT: f"{left} more values"} if left > 0 else texts


def _value(value: Any) -> str:
    """A value as a job file writes it."""
    if value is None:
        return "-"
    if isinstance(value, bool | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


ATTEMPT = ("attempt", "hosts", "began", "ended", "cause", "by", "first", "last", "lost", "safe_s",
           "action", "reason", "recovered", "waited_s", "started_s", "lost_s")  # fmt: skip


def _attempt(attempt: dict[str, Any], size: int) -> dict[str, Any]:
    error = attempt["error"] or {}
    facts = _facts(attempt, ATTEMPT, size) | {"calm": attempt["cause"] in CALM}
    if error:
        parts = filter(None, (error.get("type"), error.get("message")))
        text = str(error.get("traceback") or ": ".join(map(str, parts)))
        text = text if len(text) <= 8 * size else f"... {text[-8 * size :]}"
        facts["error"] = {
            "rank": error.get("rank"),
            "host": _cut(error.get("host") or "", size),
            "text": text,
        }
    return facts


def _causes(attempts: list[dict[str, Any]]) -> list[str]:
    """The causes of the ends of all attempts but the last one, each once."""
    return list(dict.fromkeys(str(attempt["cause"] or "unknown") for attempt in attempts[:-1]))


def _curves(run: dict[str, Any], size: PageSize) -> dict[str, Any]:
    """Fewer points, and fewer curves where a task logs very many; the newest value of each.

    The page smooths the means, since the points of a long curve are its peaks.
    """
    curves = run["curves"]
    known = [name for name in NAMES if name in curves]
    others = [name for name in curves if name not in NAMES]
    names = {name: _cut(name, size.long) for name in [*known, *others[: size.curves]]}
    long = {name: run["means"].get(name, curves[name]) for name in names
            if name in run["means"] or len(curves[name][0]) > size.points}  # fmt: skip
    return {
        "curves": {names[n]: thin(_series(curves[n]), size.points) for n in names},
        "means": {names[n]: _means(curve, size.points // 2) for n, curve in long.items()},
        "newest": {names[n]: run["newest"][n] for n in names if n in run["newest"]},
    }


def _means(curve: Curve, points: int) -> Curve:
    return means(_series(curve), points) if len(curve[0]) > points else curve


def _series(curve: Curve) -> Series:
    series = Series()
    series.add(*curve)
    return series


def _hosts(ranks: list[dict[str, Any]], heat: dict[str, Any], size: int) -> list[list[Any]]:
    """[host, its first rank] for each host with a row in the map."""
    host_of = {rank["rank"]: rank["host"] for rank in ranks}
    hosts: list[list[Any]] = []
    for rank in range(0, len(heat["rows"]) * heat["each"], heat["each"]):
        host = _cut(host_of.get(rank, ""), size)
        if not hosts or hosts[-1][0] != host:
            hosts.append([host, rank])
    return hosts


RANK = ("rank", "host", "device", "busy_s", "wait_s", "samples_per_s", "memory", "gpu", "state",
        "note")  # fmt: skip


def _ranks(ranks: list[dict[str, Any]], size: PageSize) -> dict[str, Any]:
    """The number of ranks, and the rows of the worst ones."""
    order = {"dead": 0, "slow": 1}
    own = [(rank["busy_s"] or 0.0) + (rank["wait_s"] or 0.0) for rank in ranks]

    def worse(i: int) -> tuple[int, float]:
        return order.get(ranks[i]["state"], 2), -own[i]

    worst = sorted(range(len(ranks)), key=worse)[: size.rows]
    rows = [_facts(ranks[i], RANK, size.long) for i in worst]
    rows.sort(key=lambda row: int(row["rank"]))
    states = {s: sum(rank["state"] == s for rank in ranks) for s in order}
    return {"count": len(ranks), **states, "rows": rows}


def _heat(rows: list[list[float | None]], steps: list[int], cells: int) -> dict[str, Any]:
    """The map in few cells: one character each, the worst value of the cells that it joins."""
    if not rows or not steps:
        return {"steps": [], "each": 1, "rows": []}
    each = math.ceil(len(rows) / ROWS)
    columns = min(len(steps), max(cells * each // len(rows), 40))
    each = max(each, math.ceil(len(rows) * columns / cells))
    if columns < len(steps):
        bounds = [i * len(steps) // columns for i in range(columns + 1)]
        steps = [steps[i] for i in bounds[:-1]]
        rows = [_worst_of(row, bounds) for row in rows]
    if each > 1:
        rows = [
            [_worst(column) for column in zip(*rows[i : i + each], strict=True)]
            for i in range(0, len(rows), each)
        ]
    return {
        "steps": steps,
        "each": each,
        "cell": CELL,
        "code": CODE,
        "rows": ["".join(map(_coded, row)) for row in rows],
    }


def _worst_of(row: list[float | None], bounds: list[int]) -> list[float | None]:
    return [_worst(row[a:b]) for a, b in itertools.pairwise(bounds)]


def _worst(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _coded(ratio: float | None) -> str:
    if ratio is None or not math.isfinite(ratio):
        return " "
    return CODE[max(0, min(round(ratio / CELL), len(CODE) - 1))]
