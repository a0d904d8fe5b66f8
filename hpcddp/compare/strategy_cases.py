"""The rows of `hpcddp strategies`: each strategy on a number of ranks, and combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpcddp import strategy
from hpcddp.errors import UserError
from hpcddp.keys import nearest


class Case(NamedTuple):
    """A row of the table: its name, the strategy, and the keys that it sets."""

    name: str
    strategy: str
    keys: Mapping[str, Any] = {}

    @property
    def alone(self) -> bool:
        """Whether it is one process, which cannot be combined with other strategies."""
        return any(not row.factor for row in strategy.rows(self.strategy))

    @property
    def single(self) -> bool:
        """Whether it is the reference, one process on one device."""
        return strategy.is_single(self.strategy)


ALONE = tuple(Case(name, name) for name in strategy.ALONE)
PAIRS = ("pp,ddp", "pp,zero1", "pp,fsdp", "pp,tp", "ddp,tp", "fsdp,tp")
TRIPLES = ("pp,fsdp,tp", "ddp,fsdp,tp")


def cases(ranks: int) -> list[Case]:
    """Each strategy on a number of ranks, and combinations of two and three strategies."""
    part = next((n for n in range(2, ranks) if ranks % n == 0), ranks)  # the smallest
    hybrid = [f"hsdp={part}"] if part < ranks else []
    rows = [Case(name, name) for name in ("ddp", "zero1", "fsdp", *hybrid, "tp")]
    rows += [Case(f"pp {name}", "pp", {"pp.schedule": name})
              for name in ("1f1b", "gpipe", "interleaved")]  # fmt: skip
    for names in (*PAIRS, *TRIPLES):
        *outer, last = names.split(",")
        rest, odd = divmod(ranks, part ** len(outer))
        if rest > 1 and not odd:
            sizes = [f"{name}={part}" for name in outer] + [f"{last}={rest}"]
            rows.append(Case(",".join(sizes), ",".join(sizes)))
    return [*ALONE, *rows]


def chosen(ranks: int, words: Sequence[str]) -> list[Case]:
    """The rows of some words: names of rows, or strategies.

    Raises:
        UserError: a word is neither.
    """
    every = cases(ranks)
    if not words:
        return every
    rows: list[Case] = []
    for word in words:
        named = [case for case in every if word in (case.name, case.strategy)]
        if not named:
            _check(word, every)
            named = [Case(word, word)]
        rows += [case for case in named if case not in rows]
    return [case for case in rows if case.alone] + [case for case in rows if not case.alone]


def _check(word: str, every: Sequence[Case]) -> None:
    try:
        strategy.parse(word, "--only")
    except UserError as error:
        hint = nearest(word, [case.name for case in every], what="row")
        raise UserError(error.what, where="--only", hint=hint) from None
