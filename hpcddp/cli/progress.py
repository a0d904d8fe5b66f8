"""A progress bar on a terminal, from the records that rank 0 writes; nothing elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from hpcddp.rundir import RunDir, read_lines


class Progress:
    """A context in which `show` moves the bar, and `write` prints a line above it."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.seen = 0

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            from rich import progress

            self.bar = progress.Progress(
                progress.TextColumn("step {task.completed}/{task.total}"),
                progress.BarColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task("starting", total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, record: dict[str, Any]) -> None:
        """Take in one record."""
        if not self.bar:
            return
        if record["event"] == "start":
            self.bar.update(self.task, total=record["total_steps"], completed=record["step"])
        elif record["event"] == "train":
            text = f"loss {record['loss']:.4g}  {record['samples_per_s']:.0f} samples/s"
            self.bar.update(self.task, completed=record["step"], description=text)

    def follow(self, run: RunDir) -> None:
        """Take in what is new in the newest attempt's metrics."""
        folders = run.all_attempts()
        if self.bar and folders:
            records = list(read_lines(folders[-1].metrics))
            for record in records[self.seen :]:
                self.show(record)
            self.seen = len(records)

    def write(self, line: bytes) -> None:
        """Print a line of a log above the bar."""
        if self.bar:
            text = line.decode("utf-8", "replace").rstrip("\n")
            self.bar.console.out(text, highlight=False)
