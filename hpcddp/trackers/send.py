"""Telling trackers what is new of a run, and keeping in mind how far each of them knows it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcddp import record
from hpcddp.errors import RunError
from hpcddp.observe import history
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.spec import KEYS
from hpcddp.trackers import Sink, module, plain
from hpcddp.trackers.rows import NOWHERE, Origin, Row, Rows

BATCH = 1000  # steps after which it is noted how far a tracker knows the run


class Teller:
    """What is new of a run, to some trackers. One that fails is left alone from then on.

    Args:
        failed: is told of a tracker that fails.
        last: the last attempt that is told; later ones tell for themselves.
    """

    def __init__(
        self,
        run: RunDir,
        names: Sequence[str],
        failed: Callable[[str, Exception], None],
        last: float = float("inf"),
    ) -> None:
        self.run, self._failed = run, failed
        self._lives: dict[int, history.AttemptSummary] = {}  # attempts that have ended
        self._ears: list[_Ear] = []
        for name in dict.fromkeys(names):
            self._try(name, self._listen, name)
        self._rows = Rows(run, min((ear.told for ear in self._ears), default=NOWHERE), last)

    def _listen(self, name: str) -> None:
        self._ears.append(_Ear(self.run, name))

    def tell(self, *, over: bool = False) -> None:
        """Tell what is new.

        Args:
            over: nobody writes any more.
        """
        rows = self._rows.new(over=over)
        text = self._words(over=over)
        for ear in list(self._ears):
            if not self._try(ear.name, ear.tell, rows, text):
                self._ears.remove(ear)

    def _words(self, *, over: bool) -> str:
        """What became of the attempts, and what was out of the ordinary, as plain lines."""
        try:
            lives = list(map(_life, history.summaries(self.run, over=over, kept=self._lives)))
        except RunError:
            lives = []
        return "\n".join([*lives, *self._rows.words])

    def close(self) -> None:
        """The end: trackers write down what they still hold."""
        while self._ears:
            ear = self._ears.pop()
            self._try(ear.name, ear.close)

    def _try(self, name: str, do: Callable[..., object], *args: Any) -> bool:
        try:
            do(*args)
        except Exception as error:  # whatever a library and a server can come up with
            self._failed(name, error)
            return False
        return True


class _Ear:
    """One tracker, and what it knows. It is opened when there is something to tell."""

    def __init__(self, run: RunDir, name: str) -> None:
        self.run, self.name = run, name
        self._module = module(name)
        kept = (read_json(run.trackers) or {}).get(name) or {}
        known = self._module.knows(run, kept)
        self._memory: dict[str, Any] = kept if known else {}
        attempt, size = self._memory.get("told", NOWHERE)
        self.told: Origin = (int(attempt), int(size))
        self._said = self._memory.get("said")
        self._sink: Sink | None = None

    def tell(self, rows: Sequence[Row], text: str) -> None:
        """Tell of the rows that it does not know, and the words if they are others."""
        new = [row for row in rows if row.origin > self.told]
        said = zlib.crc32(text.encode())
        if not new and said == self._said:
            return
        if self._sink is None:
            self._sink = self._module.open_sink(self.run, self._memory)
            self._memory |= self._sink.memory
        for first in range(0, len(new), BATCH):
            for row in (batch := new[first : first + BATCH]):
                self._sink.put(row.step, row.time, row.values)
            self.told = max(self.told, *(row.origin for row in batch))
            if self._sink.flush():
                self._note()
        if said != self._said:
            self._sink.say(text)
            self._said = said
            if self._sink.flush():
                self._note()

    def _note(self) -> None:
        """Write down what it knows, beside what the others know."""
        assert self._sink
        self._memory |= {**self._sink.memory, "told": list(self.told), "said": self._said}
        kept = read_json(self.run.trackers) or {}
        write_json(self.run.trackers, {**kept, self.name: self._memory})

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._note()


def _life(row: history.AttemptSummary) -> str:
    if row.cause is None:  # the same at each look, however far it is
        return f"attempt {row.attempt} on {row.hosts}: works, from step {row.first}"
    more = [f"steps {row.first} to {row.last}", row.action, row.reason]
    if row.lost:
        more.insert(1, f"{row.lost} of them taken again")
    return f"attempt {row.attempt} on {row.hosts}: {row.cause}; " + ", ".join(filter(None, more))


def config(run: RunDir) -> dict[str, str | int | float | bool]:
    """What was asked, by key; without what is secret: the environment, and passwords in URLs."""
    job = record.read(run)
    found = dict(_flat(KEYS.flatten(job.spec)))
    nodes = "-".join(map(str, sorted(set(job.nodes))))
    return {
        **found, "nodes": nodes, "gpus": job.gpus_per_node, "launcher": job.launcher,
        "hpcddp": job.version,
    }  # fmt: skip


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, str | int | float | bool]]:
    """Each value that says something, as text where it is no scalar."""
    for name, value in values.items():
        if name == "env" or name.startswith("env.") or value in ("", None, [], {}):
            continue
        yield name, value if isinstance(value, int | float | bool) else plain(str(value))
