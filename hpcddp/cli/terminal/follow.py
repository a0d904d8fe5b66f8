"""Follow the log of a run until the run ends, on every backend."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import click

from hpcddp import record
from hpcddp.cli.terminal import say
from hpcddp.cli.terminal.log_lines import paths, put
from hpcddp.cli.terminal.progress import Progress
from hpcddp.observe.poll import StatusPoll
from hpcddp.rundir import RunDir
from hpcddp.submit import submission
from hpcddp.submit.status import Status

TICK = 0.2  # seconds between two reads of the run folder


class Tail:
    """The logs of all attempts, or of one, as they grow.

    Args:
        behind: begin behind the lines that are there now.
    """

    def __init__(
        self, run: RunDir, attempt: int | None = None, *, behind: bool = False
    ) -> None:  # fmt: skip
        self.run = run
        self.attempt = attempt
        self.read: dict[str, int] = {}
        self.earlier = run.all_attempts()[-1:] if behind else []
        if behind:
            logs = (path for path in paths(run, attempt) if path.exists())
            self.read = {str(path): path.stat().st_size for path in logs}

    def lines(self) -> list[bytes]:
        """The complete lines since the last call."""
        new: list[bytes] = []
        for path in paths(self.run, self.attempt):
            start = self.read.get(str(path), 0)
            with path.open("rb") as f:
                f.seek(start)
                whole = f.read().rpartition(b"\n")
            self.read[str(path)] = start + len(whole[0]) + len(whole[1])
            new += [line + b"\n" for line in whole[0].split(b"\n")] if whole[1] else []
        return new


def wait(
    run: RunDir, each: Callable[[], None], seen: Callable[[Status], None] = lambda state: None
) -> Status:
    """Wait until the run has ended, and call `each` between two looks at its state.

    Args:
        seen: called with each state.
    """
    poll = StatusPoll(run)
    while True:
        state = poll.look()
        seen(state)
        each()
        if state.final:
            return state
        time.sleep(TICK)


def follow_log(run: RunDir, wanted: Callable[[bytes], bool], attempt: int | None) -> int:
    """Print the log until the run ends; the exit code follows from its state."""
    tail, waits = Tail(run, attempt), ""

    def each() -> None:
        for line in filter(wanted, tail.lines()):
            put(line)

    def seen(state: Status) -> None:
        nonlocal waits
        pending = state.state == "PENDING" and state.reason not in ("", "None")
        now = f"{run.name} is PENDING: {state.reason}" if pending else ""
        if now and now != waits:
            say.note(now)
        waits = now

    try:
        state = wait(run, each, seen)
    except KeyboardInterrupt:
        return 130
    each()
    return outcome(state)


def outcome(state: Status) -> int:
    """The exit code of a command that has followed a run to its end."""
    well = state.state in ("COMPLETED", "STOPPED", "RENDERED") and not state.refused
    return 0 if well else 1


class Interrupts:
    """Ctrl-C, or the end of the terminal, while a run is followed.

    On Slurm both detach. On this machine the first signal asks the run to save and stop, and the
    second kills it. The handler only counts; `act` does the rest.
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
        """Act on the signals since the last call."""
        if self.count <= self.answered:
            return
        first, self.answered = not self.answered, self.count
        if first and self.count == 1:
            submission.request(self.run, "stop")
            click.echo(
                "saving a checkpoint and stopping; press Ctrl-C again to kill the run", err=True
            )
        else:
            submission.kill_local(self.run)
            click.echo("killed", err=True)


def follow_run(run: RunDir, *, as_json: bool, tail: Tail | None = None) -> int:
    """Follow a run that was just submitted, until its end or Ctrl-C.

    Args:
        tail: the log of a run that had attempts before, from the new one on.
    """
    tail = tail or Tail(run)
    progress = Progress(after=max((folder.number for folder in tail.earlier), default=0))

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
        say.note(f"the run continues; `hpcddp logs -f {run.name}` follows it again")
        say.release()
        return 130
    return finish(run, state, as_json=as_json, interrupted=interrupts.answered > 0)


def finish(run: RunDir, state: Status, *, as_json: bool, interrupted: bool) -> int:
    """Print how the run ended; the exit code of the command."""
    if as_json:
        click.echo(json.dumps(state.to_dict()))
    else:
        reason = f": {state.reason}" if state.reason else ""
        click.echo(f"{say.paint_state(state.state, sys.stderr)} {run.name}{reason}", err=True)
    sys.stdout.flush()
    if interrupted:
        return 130
    return outcome(state)
