"""Following a run: its log as it grows, until its end. The same for every backend."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import click

from hpcddp import record
from hpcddp.cli.terminal.log_lines import paths, put
from hpcddp.cli.terminal.progress import Progress
from hpcddp.observe.poll import StatusPoll
from hpcddp.rundir import RunDir
from hpcddp.submit import submission
from hpcddp.submit.status import Status

TICK = 0.2  # seconds between two looks at the run dir


class Tail:
    """The logs of all attempts, or of one, as they grow."""

    def __init__(self, run: RunDir, attempt: int | None = None) -> None:
        self.run = run
        self.attempt = attempt
        self.read: dict[str, int] = {}

    def lines(self) -> list[bytes]:
        """The whole lines that are new."""
        new: list[bytes] = []
        for path in paths(self.run, self.attempt):
            start = self.read.get(str(path), 0)
            with path.open("rb") as f:
                f.seek(start)
                whole = f.read().rpartition(b"\n")
            self.read[str(path)] = start + len(whole[0]) + len(whole[1])
            new += [line + b"\n" for line in whole[0].split(b"\n")] if whole[1] else []
        return new


def wait(run: RunDir, each: Callable[[], None]) -> Status:
    """Wait until the run has ended, and call `each` again and again."""
    poll = StatusPoll(run)
    while True:
        state = poll.look()
        each()
        if state.final:
            return state
        time.sleep(TICK)


def follow_log(run: RunDir, wanted: Callable[[bytes], bool], attempt: int | None) -> int:
    """Print the log until the run ends; its outcome as exit code."""
    tail = Tail(run, attempt)

    def each() -> None:
        for line in filter(wanted, tail.lines()):
            put(line)

    try:
        state = wait(run, each)
    except KeyboardInterrupt:
        return 130
    each()
    return outcome(state)


def outcome(state: Status) -> int:
    """The exit code of a command that has seen a run's end."""
    well = state.state in ("COMPLETED", "STOPPED", "RENDERED") and not state.refused
    return 0 if well else 1


class Interrupts:
    """Ctrl-C, and a terminal that goes away, while a run is followed.

    On Slurm they detach. Here the first asks the run to save and stop, the second kills it. The
    handler only counts: `act` does the rest.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.local = record.read(run).backend == "local"
        self.count = 0
        self.answered = 0

    def __enter__(self) -> Interrupts:
        numbers = (signal.SIGINT, signal.SIGHUP)
        self.before = {n: signal.signal(n, self._handle) for n in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if not self.local:
            raise KeyboardInterrupt

    def act(self) -> None:
        """Answer the signals since the last call."""
        if self.count <= self.answered:
            return
        first, self.answered = not self.answered, self.count
        if first and self.count == 1:
            submission.request(self.run, "stop")
            click.echo("saving and stopping; Ctrl-C again kills", err=True)
        else:
            submission.kill_local(self.run)
            click.echo("killed", err=True)


def follow_run(run: RunDir, *, as_json: bool) -> int:
    """Follow a run that was just submitted, to its end or to a Ctrl-C."""
    tail = Tail(run)
    progress = Progress()

    def each() -> None:
        interrupts.act()
        for line in tail.lines():
            if progress.bar:
                progress.write(line)
            else:
                put(line, sys.stderr if as_json else sys.stdout)
        progress.follow(run)

    try:
        with Interrupts(run) as interrupts, progress:
            state = wait(run, each)
            each()
    except KeyboardInterrupt:
        click.echo(f"detached: the run goes on; hpcddp logs -f {run.name} comes back", err=True)
        return 130
    return finish(run, state, as_json=as_json, interrupted=interrupts.answered > 0)


def finish(run: RunDir, state: Status, *, as_json: bool, interrupted: bool) -> int:
    """Say how the run ended; the exit code of the command."""
    if as_json:
        click.echo(json.dumps(state.to_dict()))
    else:
        reason = f": {state.reason}" if state.reason else ""
        click.echo(f"{state.state} {run.name}{reason}", err=True)
    sys.stdout.flush()
    if interrupted:
        return 130
    return outcome(state)
