"""A progress bar on a terminal, from the records of rank 0. A file or a pipe gets none."""

from __future__ import annotations

import sys
from typing import Any

from hpcddp.attempt.joblog import REDRAWN
from hpcddp.cli.terminal.shown import shown
from hpcddp.rundir import RunDir, parse_lines
from hpcddp.submit.status import whole


class Progress:
    """A context in which `show` moves the bar, and `write` prints a line above it.

    Args:
        after: the attempt whose records, and those before, are not shown.
    """

    def __init__(self, after: int = 0) -> None:
        self.bar: Any = None
        self.of = ""  # "/" and the steps of the whole training, if they are known
        self.after = after
        self.attempt = self.read = 0  # the attempt that is followed, and the bytes read of it

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            from rich import progress

            self.columns = (
                progress.TextColumn("{task.fields[place]}"),
                progress.BarColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
            )
            self.bar = progress.Progress(*self.columns, transient=True)
            self.bar.start()
            self.task = self.bar.add_task("starting", total=None, place="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, record: dict[str, Any]) -> None:
        """Show one record."""
        if not self.bar:
            return
        step = whole(record.get("step"))
        if record.get("event") == "start":
            total = whole(
                record.get("total_steps")
            )  # 0 if a loop of the user's own does not know it
            self.of = f"/{total}" if total else ""
            self.bar.columns = self.columns if total else self.columns[:3:2]
            self.bar.reset(self.task, total=total or None, completed=step, description="")
        elif record.get("event") in ("train", "step"):
            self.bar.update(self.task, completed=step, description=_figures(record))
        else:
            return
        self.bar.update(self.task, place=f"step {step}{self.of}")

    def follow(self, run: RunDir) -> None:
        """Show the new records of the newest attempt."""
        folders = run.all_attempts()
        if not self.bar or not folders:
            return
        from hpcddp.observe.curves import whole_lines

        newest = folders[-1]
        if newest.number <= self.after:
            return
        if newest.number != self.attempt:
            self.attempt, self.read = newest.number, 0
        for data in whole_lines(newest.metrics, self.read):
            self.read += len(data)
            for record in parse_lines(data.splitlines()):
                self.show(record)

    def write(self, line: bytes) -> None:
        """Print a line of a log above the bar, without control characters."""
        if self.bar:
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            text = REDRAWN.sub(r"\1", text)  # of a progress bar of the program's own the last state
            self.bar.console.out(shown(text), highlight=False)


def _figures(record: dict[str, Any]) -> str:
    """The known figures of a record."""
    forms = {"loss": "loss {:.4g}", "samples_per_s": "{:.0f} samples/s"}
    known = {n: v for n in forms if isinstance(v := record.get(n), float)}
    return "  ".join(forms[name].format(value) for name, value in known.items())
