"""`hpcddp strategies`: train with each strategy on this machine, and print a table."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli import completion
from hpcddp.cli.options import SET, complete_jobs, flags, json_option
from hpcddp.cli.terminal import say, tables
from hpcddp.errors import UserError
from hpcddp.planning import jobfile

if TYPE_CHECKING:
    from hpcddp.compare.trial import Trial

SCHEMA_VERSION = 1
PARTS = ("parameters", "gradients", "optimizer", "peak")
HEAD = ("float64", "float32", "params", "grads", "optim", "peak", "sent", "step")
UNITS = ("", "", "MB", "MB", "MB", "MB", "MB", "ms")
WIDTH = 9
LEGEND = """\
float64, float32  relative difference of the last loss from that of one process in float64
params to peak    memory of the rank that needs most
sent              bytes that all ranks together send in a step"""


@click.command()
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("--ranks", metavar="N", type=click.IntRange(min=2), default=4, show_default=True,
              help="Processes per strategy.")  # fmt: skip
@click.option("--steps", metavar="N", type=click.IntRange(min=4), default=50, show_default=True,
              help="Optimizer steps of each training.")  # fmt: skip
@click.option("--only", multiple=True, metavar="STRATEGY", shell_complete=completion.strategies,
              help="Only this strategy, or row of the table.  [repeatable]")  # fmt: skip
@click.option("--set", **SET)
@click.option("--keep", metavar="FOLDER", help="New folder for logs and metrics, which are kept.")
@json_option
def strategies(job: str | None, ranks: int, steps: int, only: tuple[str, ...],
               keep: str | None, as_json: bool, **given: Any) -> int:  # fmt: skip
    """Train JOB for some steps with each strategy, in processes on this machine.

    Each strategy trains in float32, which is timed and measured, and in float64, where its loss
    equals that of one process up to rounding. Incompatible strategies are listed with the reason.
    The exit code is 4 if a strategy failed.
    """
    from hpcddp.compare import strategy_cases, trial

    chosen = strategy_cases.chosen(ranks, only)
    if not any(case.single for case in chosen):
        chosen = [strategy_cases.ALONE[0], *chosen]  # the reference
    layers, notes = jobfile.load(job, flags(given), os.environ, Path.cwd())
    for text in notes:
        say.note(text)
    with _folder(keep) as root:
        trials = [trial.prepare(layers, case, ranks, steps, root) for case in chosen]
        played = trial.play(trials, root, say.note)
        show = _print_json if as_json else _print_table
        show(played, ranks, steps, [case.name for case in chosen])
    if any(t.failed for t in trials):
        say.warning("some strategies failed; --keep FOLDER keeps the logs of their ranks")
        return 4
    return 0


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """A new folder for runs and logs, which is removed unless the user named it."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="hpcddp-strategies-") as made:
            yield Path(made)
        return
    folder = Path(keep).absolute()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        hint = "name a folder that does not exist"
        raise UserError(f"the folder {keep} exists already", where="--keep", hint=hint) from None
    yield folder


def _rows(played: Iterator[Trial]) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Each trial with its row as plain data."""
    from hpcddp.compare.trial import figures

    reference: float | None = None
    for trial in played:
        row: dict[str, Any] = {
            "name": trial.case.name,
            "strategy": trial.case.strategy,
            "ranks": trial.ranks,
            "ended": "failed" if trial.failed else "refused" if trial.reason else "done",
            "reason": trial.reason,
        }
        if not trial.reason:
            measured = figures(trial)
            if trial.case.single:
                reference = measured.loss.get("fp64")
            row |= {"loss": measured.loss, "memory": measured.memory, "sent": measured.sent,
                    "step_s": measured.step,
                    "difference": {p: _difference(loss, reference)
                                   for p, loss in measured.loss.items()}}  # fmt: skip
        yield trial, row


def _difference(loss: float, reference: float | None) -> float | None:
    """Relative to the reference, if there is one."""
    return abs(loss - reference) / abs(reference) if reference else None


def _print_json(played: Iterator[Trial], ranks: int, steps: int, names: Sequence[str]) -> None:
    """One object with a line for each row."""
    head = json.dumps({"schema_version": SCHEMA_VERSION, "ranks": ranks, "steps": steps})
    click.echo(head.removesuffix("}") + ', "rows": [', nl=False)
    before = "\n"
    for _, row in _rows(played):
        click.echo(before + json.dumps(row), nl=False)
        before = ",\n"
    click.echo("\n]}")


def _print_table(played: Iterator[Trial], ranks: int, steps: int, names: Sequence[str]) -> None:
    """Aligned lines, with the units below the head; blocks of lines on a narrow terminal."""
    width = max(len("strategy"), *map(len, names))
    narrow = width + WIDTH * len(HEAD) > tables.columns()
    for head in (("strategy", *HEAD), (f"{ranks} ranks", *UNITS)) if not narrow else ():
        click.echo(_line(width, head))
    for trial, row in _rows(played):
        if trial.reason:
            text = f"{row['name']:{width}}  {row['ended']}: {trial.reason}"
        elif narrow:
            heads = [f"{name} {unit}".strip() for name, unit in zip(HEAD, UNITS, strict=True)]
            cells = _cells(row)
            text = "\n".join(tables.block(["strategy", *heads], cells, tables.columns()))
        else:
            text = _line(width, _cells(row))
        click.echo(text + "  one process" * (trial.ranks == 1))
    click.echo(LEGEND, err=True)


def _line(width: int, cells: Sequence[str]) -> str:
    first, *rest = cells
    return (f"{first:{width}}" + "".join(f"{cell:>{WIDTH}}" for cell in rest)).rstrip()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    differences = [_text(row["difference"].get(p), 1, ".1e") for p in ("fp64", "fp32")]
    memory = [_text(row["memory"].get(part), 1e6, ".2f") for part in PARTS]
    last = _text(row["sent"], 1e6, ".2f"), _text(row["step_s"], 1e-3, ".1f")
    return (row["name"], *differences, *memory, *last)


def _text(value: float | None, unit: float, how: str) -> str:
    return "-" if value is None else f"{value / unit:{how}}"
