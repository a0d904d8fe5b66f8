"""Trials: small requests that `sbatch --test-only` is asked about, to find what a site requires.

What a job_submit plugin demands is nowhere to be read; its words and its answers tell. At most four
requests are tried. Nothing is submitted, but each trial uses up a job id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpcddp.planning.site import choices, partition_choice
from hpcddp.planning.site.choices import Choice
from hpcddp.planning.site.site_facts import SiteFacts

MOST = 4
LONGEST = 160  # characters of Slurm's words
TIME = "1:00:00"  # of a job without a time limit, where the site requires one

NAMES = ("clusters", "partition", "account", "qos", "constraint", "time")  # options without GPUs
Ask = Callable[[str], tuple[bool, str]]  # a script -> accepted, and Slurm's words


@dataclass(frozen=True)
class SampleRequest:
    """A request for one GPU, by the long names of sbatch's options; "" for none."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    time: str = ""
    gpus: str = ""  # with its option: gpus-per-node=1
    clusters: str = ""

    def __str__(self) -> str:
        return " ".join(f"--{option}" for option in self.options()) or "(no option)"

    def options(self) -> list[str]:
        """The options with their values."""
        rows = [f"{name}={getattr(self, name)}" for name in NAMES if getattr(self, name)]
        return [*rows, self.gpus] if self.gpus else rows

    def script(self) -> str:
        """A batch script that makes the request."""
        lines = "".join(f"#SBATCH --{option}\n" for option in self.options())
        return f"#!/bin/bash\n#SBATCH --nodes=1\n{lines}true\n"


@dataclass(frozen=True)
class Verdict:
    """A request and what sbatch said of it."""

    request: SampleRequest
    accepted: bool
    words: str

    def __str__(self) -> str:
        return f"{self.request}: {'accepted' if self.accepted else f'refused: {self.said}'}"

    @property
    def said(self) -> str:
        """The words in one line that is not too long for a comment."""
        words = "".join(c if c.isprintable() else " " for c in self.words)
        return " ".join(words.split())[:LONGEST]


def run(facts: SiteFacts, guesses: Sequence[Choice], ask: Ask) -> list[Verdict]:
    """The trials: from what the guesses say to what the site accepts; the last one is accepted, or
    none is.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    request = _first(facts, guesses)
    trials: list[Verdict] = []
    while len(trials) < MOST:
        accepted, words = ask(request.script())
        trials.append(Verdict(request, accepted, words))
        if accepted:
            trials += _better(facts, request, ask) if len(trials) < MOST else []
            break
        tried = {trial.request for trial in trials}
        later = _next(facts, guesses, request, words)
        request = next((other for other in later if other not in tried), request)
        if request in tried:
            break
    return trials


def _better(facts: SiteFacts, request: SampleRequest, ask: Ask) -> list[Verdict]:
    """The same request with the QOS for ordinary jobs, where the user's default is one for trials;
    none if the site refuses that."""
    usual = next((row.default_qos for row in facts.associations if row.default_qos), "")
    qos = _qos(facts, request.constraint)
    if request.qos or not qos or not partition_choice.TRIAL.search(usual):
        return []
    other = replace(request, qos=qos)
    accepted, words = ask(other.script())
    return [Verdict(other, accepted, words)] if accepted else []


def _first(facts: SiteFacts, guesses: Sequence[Choice]) -> SampleRequest:
    """What the guesses say; where a plugin may choose the partition, without a guessed one. GPUs
    only where the partition has some."""
    request = _guessed(guesses)
    partition, _ = partition_choice.best_partition(facts)
    if partition and not any(kind.gpus for kind in facts.kinds_of(partition.name)):
        request = replace(request, gpus="")
    return replace(request, partition="") if _routes(facts) else request


def _routes(facts: SiteFacts) -> bool:
    """Whether a plugin may choose a job's partition."""
    return facts.config.get("JobSubmitPlugins", "") not in ("", "(null)")


def _guessed(guesses: Sequence[Choice]) -> SampleRequest:
    values = {row.key: str(row.value) for row in guesses}
    option, kind = values.get("gpu_option", "none"), values.get("gpu_type", "")
    gpus = _gpu_options(f"{kind}:1" if kind else "1").get(option, "")
    return SampleRequest(
        values.get("slurm.partition", ""), values.get("slurm.account", ""),
        values.get("slurm.qos", ""), values.get("slurm.constraint", ""), "", gpus,
        values.get("slurm.clusters", ""),
    )  # fmt: skip


def _gpu_options(number: str) -> dict[str, str]:
    """The options that request GPUs, by name."""
    return {"gpus-per-node": f"gpus-per-node={number}", "gres": f"gres=gpu:{number}"}


def _next(
    facts: SiteFacts, guesses: Sequence[Choice], request: SampleRequest, words: str
) -> Iterator[SampleRequest]:
    """Requests to try after a refusal, what its words name first."""
    steps = [
        (r"\btime|wall", {"time": request.time or TIME}),
        (r"constraint|feature", {"constraint": request.constraint or _feature(facts),
                                 "partition": "", "qos": ""}),
        (r"account|project|charge|allocation", {"account": request.account or _account(facts)}),
        (r"\bqos\b|quality", {"qos": request.qos or _qos(facts)}),
        (r"partition|queue", {"partition": request.partition or _guessed(guesses).partition}),
        (rf"--{_other_option(request)}\b", {"gpus": request.gpus and _other_gpus(request)}),
    ]  # fmt: skip
    named = [change for pattern, change in steps if re.search(pattern, words, re.IGNORECASE)]
    order = [steps[4], steps[2], steps[1], steps[3], steps[0]]
    for change in [*named, *(change for _, change in order)]:
        yield replace(request, **change)


def _other_option(request: SampleRequest) -> str:
    """The option for GPUs that a request does not use."""
    return "gpus-per-node" if request.gpus.startswith("gres=") else "gres"


def _other_gpus(request: SampleRequest) -> str:
    """The GPUs of a request with the other option."""
    return _gpu_options(request.gpus.partition("=")[2].removeprefix("gpu:"))[_other_option(request)]


def _feature(facts: SiteFacts) -> str:
    """A feature of all nodes with GPUs, and of no other: gpu, if it is one of them."""
    have = [set(kind.features) for kind in facts.kinds if kind.gpus]
    others: set[str] = set().union(*(set(kind.features) for kind in facts.kinds if not kind.gpus))
    common = set.intersection(*have) - others if have else set[str]()
    return next(iter(sorted(common, key=lambda name: (name != "gpu", name))), "")


def _account(facts: SiteFacts) -> str:
    return next(iter(partition_choice.accounts_for(facts, None)), "")


def _qos(facts: SiteFacts, kind: str = "") -> str:
    """The QOS for ordinary jobs among those of the user.

    Args:
        kind: of nodes: where a plugin turns `regular` into `gpu_regular`, only that one is known.
    """
    mine = {name for row in facts.associations for name in row.qos}
    return next((n for n in choices.USUAL if n in mine or f"{kind}_{n}" in mine), "")


def _reason(name: str, trials: Sequence[Verdict]) -> str:
    """Why the accepted request has an option that was no guess."""
    without = [trial for trial in trials if not getattr(trial.request, name)]
    if any(trial.accepted for trial in without):
        return "guess: for ordinary jobs; your default one is for trials"
    words = without[-1].said if without else ""
    return f"guess: sbatch refused a job without it: {words}"


def applied(guesses: Sequence[Choice], trials: Sequence[Verdict]) -> list[Choice]:
    """The values after the trials: those of the accepted request; the guesses if none was."""
    if not trials or not trials[-1].accepted:
        return list(guesses)
    request, before = trials[-1].request, {row.key: row for row in guesses}
    rows = [row for row in guesses if row.key.removeprefix("slurm.") not in vars(request)]
    rows = [_accepted_option(row, trials) if row.key == "gpu_option" else row for row in rows]
    for name in NAMES:
        value = getattr(request, name)
        guess = before.get(f"slurm.{name}")
        if value and guess and guess.value == value:
            rows.append(replace(guess, comment=f"{guess.comment}; sbatch accepts it"))
        elif value:
            rows.append(Choice(f"slurm.{name}", value, _reason(name, trials)))
    return rows


def _accepted_option(guess: Choice, trials: Sequence[Verdict]) -> Choice:
    """The option for GPUs of the accepted request; the guess where that has none."""
    option = trials[-1].request.gpus.partition("=")[0] or guess.value
    if option == guess.value:
        return guess
    words = [row.said for row in trials if row.request.gpus.startswith(f"{guess.value}=")][-1]
    return Choice(guess.key, option, f"{guess.comment}; sbatch refused --{guess.value}: {words}")
