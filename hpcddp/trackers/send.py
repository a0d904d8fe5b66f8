"""Send the new metrics of a run to trackers, and record how far each tracker has them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcddp import record
from hpcddp.errors import RunError
from hpcddp.observe import history
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.sizes import counted
from hpcddp.spec import KEYS
from hpcddp.trackers import Sink, module, plain
from hpcddp.trackers.step_values import NOWHERE, Origin, StepReader, StepValues

BATCH = 1000  # steps between two records of a tracker's progress


class Sender:
    """Sends the new metrics of a run to trackers. A tracker that fails gets no more.

    Args:
        run: the run.
        names: of the trackers.
        failed: called with the name and the error of a tracker that fails.
        last: the last attempt to send; later attempts have their own process.
    """

    def __init__(
        self,
        run: RunDir,
        names: Sequence[str],
        failed: Callable[[str, Exception], None],
        last: float = float("inf"),
    ) -> None:
        self.run, self._failed = run, failed
        self._ended: dict[int, history.AttemptSummary] = {}  # attempts that have ended
        self._trackers: list[_Tracker] = []
        self._outcomes: dict[str, str] = {}  # of the closed trackers
        for name in dict.fromkeys(names):
            self._try(name, self._add, name)
        sent = min((tracker.sent for tracker in self._trackers), default=NOWHERE)
        self._reader = StepReader(run, sent, last)

    def _add(self, name: str) -> None:
        self._trackers.append(_Tracker(self.run, name))

    def send(self, *, over: bool = False) -> None:
        """Send the new steps and the text about the attempts.

        Args:
            over: the run has ended.
        """
        steps = self._reader.new(over=over)
        text = self._words(over=over)
        for tracker in list(self._trackers):
            if not self._try(tracker.name, tracker.send, steps, text):
                self._trackers.remove(tracker)

    def _words(self, *, over: bool) -> str:
        """The attempts and the unusual events, one line each."""
        try:
            attempts = history.summaries(self.run, over=over, kept=self._ended)
        except RunError:
            attempts = []
        return "\n".join([*map(_in_words, attempts), *self._reader.words])

    def close(self) -> None:
        """Close each tracker, which writes the rest."""
        while self._trackers:
            tracker = self._trackers.pop(0)
            if self._try(tracker.name, tracker.close):
                self._outcomes[tracker.name] = tracker.outcome(empty=self._reader.empty)

    def outcomes(self) -> list[str]:
        """What was sent, one line for each tracker that was closed without an error."""
        return [f"{name}: {text}" for name, text in self._outcomes.items()]

    def _try(self, name: str, do: Callable[..., object], *args: Any) -> bool:
        try:
            do(*args)
        except Exception as error:  # a library or a server may raise anything
            self._failed(name, error)
            return False
        return True


class _Tracker:
    """One tracker, and how far it has the run. It is opened for the first new step or text."""

    def __init__(self, run: RunDir, name: str) -> None:
        self.run, self.name = run, name
        self._module = module(name)
        kept = (read_json(run.trackers) or {}).get(name) or {}
        known = self._module.knows(run, kept)
        self._memory: dict[str, Any] = kept if known else {}
        attempt, size = self._memory.get("told", NOWHERE)
        self.sent: Origin = (int(attempt), int(size))
        self._sent_text = self._memory.get("said")  # its checksum
        self._sink: Sink | None = None
        self._count = 0  # steps that this process has sent

    def send(self, steps: Sequence[StepValues], text: str) -> None:
        """Send the new steps, and the text if it has changed."""
        new = [step for step in steps if step.origin > self.sent]
        checksum = zlib.crc32(text.encode())
        if not new and (checksum == self._sent_text or not text):
            return
        if self._sink is None:
            self._sink = self._module.open_sink(self.run, self._memory)
            self._memory |= self._sink.memory
        for first in range(0, len(new), BATCH):
            for step in (batch := new[first : first + BATCH]):
                self._sink.put(step.step, step.time, step.values)
            self.sent = max(self.sent, *(step.origin for step in batch))
            self._count += len(batch)
            if self._sink.flush():
                self._note()
        if checksum != self._sent_text:
            self._sink.say(text)
            self._sent_text = checksum
            if self._sink.flush():
                self._note()

    def _note(self) -> None:
        """Record the progress, beside the records of the other trackers."""
        assert self._sink
        self._memory |= {**self._sink.memory, "told": list(self.sent), "said": self._sent_text}
        kept = read_json(self.run.trackers) or {}
        write_json(self.run.trackers, {**kept, self.name: self._memory})

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._note()

    def outcome(self, *, empty: bool) -> str:
        """What this process has sent.

        Args:
            empty: the run has no metrics yet.
        """
        if self._sink and self._count:
            return f"sent {counted(self._count, 'step')} to {self._sink.place}"
        return "the run has no metrics yet" if empty else "no new steps"


def _in_words(attempt: history.AttemptSummary) -> str:
    where = f"attempt {attempt.attempt} on {attempt.hosts}"
    if attempt.cause is None:  # without its progress: the text is sent only when it changes
        return f"{where}: running, from step {attempt.first}"
    facts = [f"steps {attempt.first} to {attempt.last}", attempt.action, attempt.reason]
    if attempt.lost:
        facts.insert(1, f"{attempt.lost} of them repeated")
    return f"{where}: {attempt.cause}; " + ", ".join(filter(None, facts))


def config(run: RunDir) -> dict[str, str | int | float | bool]:
    """The values of a job's keys, without secrets: no [env], and no passwords in URLs."""
    job = record.read(run)
    values = dict(_flat(KEYS.flatten(job.spec)))
    nodes = "-".join(map(str, sorted(set(job.nodes))))
    return {
        **values, "nodes": nodes, "gpus": job.gpus_per_node, "launcher": job.launcher,
        "hpcddp": job.version,
    }  # fmt: skip


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, str | int | float | bool]]:
    """Each value that is set; a value that is no number or boolean becomes a string."""
    for name, value in values.items():
        if name == "env" or name.startswith("env.") or value in ("", None, [], {}):
            continue
        yield name, value if isinstance(value, int | float | bool) else plain(str(value))
