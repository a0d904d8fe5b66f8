"""Before step 3: commands that begin with a launcher of their own, such as `torchrun train.py`.

hpcddp starts the ranks. A launcher in the command would start a whole set of ranks in each of them.
Where its options only repeat the job's nodes and GPUs, the ranks run its script instead, and a note
says so. Any other launcher or option is refused, with the whole command that does it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcddp.errors import UserError
from hpcddp.planning import launcher_options as known
from hpcddp.planning.launcher_options import LAUNCHERS, MODULES, WRAPPERS, ForeignLauncher
from hpcddp.sizes import NodeRange, counted, whole


class Option(NamedTuple):
    """An option of a launcher as written, its key without dashes, and its value."""

    text: str
    key: str
    value: str


class Invocation(NamedTuple):
    """A launcher in a command.

    Args:
        words: the command without the launcher.
    """

    row: ForeignLauncher
    options: list[Option]
    words: list[str]


class AskedSize(NamedTuple):
    """The job's size, and the sources of its values."""

    nodes: NodeRange
    gpus: int
    sources: Mapping[str, str]
    backend: str


def settle(
    words: Sequence[str], key: str, size: AskedSize, line: Sequence[str]
) -> tuple[list[str], str]:
    """The command that each rank runs, and a note for the user; "" for none.

    Args:
        key: of the command: command or resume_command.
        line: the words of the command line, without the program; empty if unknown.

    Raises:
        UserError: the command begins with a launcher that does more than start the job's ranks.
    """
    inner = find(words)
    if inner is None:
        return list(words), ""
    problem = next(
        filter(None, (_problem(option, inner.row, size) for option in inner.options)), ""
    )
    if not inner.row.becomes_script:
        problem = f"{inner.row.name} would start ranks inside each rank; hpcddp starts them itself"
    elif inner.row.needs and not any(o.key == inner.row.needs for o in inner.options):
        problem = f"{inner.row.name} passes --local-rank to the script; hpcddp sets LOCAL_RANK only"
    elif not inner.words:
        problem = f"{inner.row.name} has no script"
    if problem:
        where = size.sources.get(key, key)
        raise UserError(problem, where=where, hint=_correction(inner, key, size, line))
    ranks = counted(size.nodes.max * size.gpus, "rank")
    note = f"{inner.row.name} only repeats --nodes and --gpus: each of {ranks} runs"
    return inner.words, f"{note} `{shlex.join(inner.words)}`{inner.row.note}"


def find(words: Sequence[str]) -> Invocation | None:
    """The launcher at the front of a command, also behind `env`, `timeout`, `uv run`, ...; None
    without one."""
    front, rest = _unwrapped(list(words))
    python: list[str] = []
    if rest and re.fullmatch(r"python[\d.]*", Path(rest[0]).name):
        python, rest = _unwrapped_python(rest)
    name = Path(rest[0]).name if rest else ""
    if rest[1:] and f"{name} {rest[1]}" in LAUNCHERS:
        name = f"{name} {rest.pop(1)}"
    row = LAUNCHERS.get(name)
    if row is None:
        return None
    program = rest.pop(0)
    options, script = _options(rest, row)
    keys = [row.options.get(option.key) for option in options]
    if row.python and script and known.PROGRAM not in keys:
        module = ["-m"] if known.MODULE in keys else []
        script = [*(python or [_python_of(program)]), *module, *script]
    return Invocation(row, options, [*front, *script] if script else [])


def _unwrapped(rest: list[str]) -> tuple[list[str], list[str]]:
    """Programs that only start another one, with their options, and the rest of the command."""
    front: list[str] = []
    while rest and (row := WRAPPERS.get(Path(rest[0]).name)):
        end = 1
        if row.verb:
            if rest[1:2] != [row.verb]:
                break
            end = 2
        while end < len(rest) and (
            rest[end].startswith("-") or (row.variables and "=" in rest[end])
        ):
            if row.module and rest[end] in ("-m", "--module"):
                return front + rest[:end], ["python", "-m", *rest[end + 1 :]]
            end += 2 if rest[end] in row.valued else 1
        end += row.arguments
        front, rest = front + rest[:end], rest[end:]
    return front, rest


def _unwrapped_python(rest: list[str]) -> tuple[list[str], list[str]]:
    """Python with its options, and the rest: a script, or the program that a module stands for."""
    python = [rest.pop(0)]
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        word = rest.pop(0)
        option = re.match(r"-([a-zA-Z]*?)([mcWX])(.*)", word)
        if option is None or word.startswith("--"):
            python.append(word)
            continue
        value = option[3] or (rest.pop(0) if rest else "")
        if option[2] in "mc":
            python += [f"-{option[1]}"] * bool(option[1])
            name = MODULES.get(value, "") if option[2] == "m" else ""
            return python, [*name.split(), *rest] if name else []
        python += [word] if option[3] else [word, value]
    return python, rest


def _python_of(program: str) -> str:
    """The Python of a launcher's script: the one beside it, `python` where that is the same."""
    path = shutil.which(program)
    beside = Path(path).parent / "python" if path else None
    if not beside or not beside.exists() or shutil.which("python") == str(beside):
        return "python"
    return str(beside)


def _options(rest: list[str], row: ForeignLauncher) -> tuple[list[Option], list[str]]:
    """The options of a launcher, and the words behind them."""
    options = []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        key = name.lstrip("-").replace("_", "-")
        known_key = key in row.options or key in row.flags
        if not known_key and word[1] != "-" and (word[1] in row.options or word[1] in row.flags):
            key, equals, value = word[1], "=", word[2:]  # -n8
        count = 0 if equals or key in row.flags else row.values.get(key, 1)
        if not known_key and rest and _is_script(rest[0]):
            count = 0
        taken, rest = rest[:count], rest[count:]
        options.append(Option(" ".join([word, *taken]), key, value if equals else " ".join(taken)))
    return options, rest


def _is_script(word: str) -> bool:
    """Whether a word behind an unknown option is its script rather than its value."""
    name = Path(word).name
    return bool(
        re.search(r"\.(py|sh|bash)$|^(python[\d.]*|bash|sh)$", name)
        or ("/" in word and shutil.which(word))
    )


def _problem(option: Option, row: ForeignLauncher, size: AskedSize) -> str:
    """Why an option is more than a repetition of the job's size; "" if it is not."""
    nodes, gpus, meaning = size.nodes, size.gpus, row.options.get(option.key)
    here = f"--nodes {nodes} --gpus {gpus}"
    if meaning in (known.MODULE, known.PROGRAM, known.NOTHING):
        return ""
    good = {
        known.NODES: option.value.replace(":", "-") in (str(nodes), f"{nodes.min}-{nodes.max}"),
        known.GPUS: whole(option.value) == gpus
        or (option.value in ("gpu", "auto") and size.sources.get("gpus", "default") != "default"),
        known.RANKS: nodes.min == nodes.max and whole(option.value) == nodes.max * gpus,
        known.ONE_NODE: nodes.max == 1,
        known.SEVERAL: nodes.max * gpus > 1,
    }
    if meaning not in good:
        return f"{row.name} {option.text} would be lost: hpcddp starts the ranks itself"
    return "" if good[meaning] else f"{row.name} {option.text} conflicts with {here}"


def _correction(inner: Invocation, key: str, size: AskedSize, line: Sequence[str]) -> str:
    """The whole command that does what was meant, as a hint."""
    levels, named, more, lost = [inner], _sizes(inner, size), *_translated(inner, size)
    while deeper := find(levels[-1].words):  # srun torchrun train.py
        levels.append(deeper)
        named |= _sizes(deeper, size)
        more, lost = (a + b for a, b in zip((more, lost), _translated(deeper, size), strict=True))
    words, given = levels[-1].words or ["python", "train.py"], size.sources
    sizes = {k: v for k, v in named.items() if not given.get(k, "").startswith("--")}
    left = "; N is the number of GPUs per node" if "N" in sizes.values() else ""
    left += "".join(f"; or change to --{k} {v}" for k, v in named.items() if k not in sizes)
    left += f"; without equivalent: {', '.join(lost)}" if lost else ""
    if size.sources.get(key, "").endswith(".toml"):
        keys = [f"{name} = {json.dumps(value)}" for name, value in sizes.items()]
        keys += [f"{key} = {json.dumps(words, ensure_ascii=False)}"]
        options = f", and add the options {shlex.join(more)}" if more else ""
        return f"write {' and '.join(keys)}{options}{left}"
    if key != "command":
        return f"use: --set {shlex.quote(f'{key}={shlex.join(words)}')}{left}"
    before = list(line[: line.index("--")]) if "--" in line else ["submit"]
    if "--" not in line:
        sizes = {"nodes": str(size.nodes), "gpus": size.gpus, **sizes}
    added = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    return f"use: {shlex.join(['hpcddp', *before, *added, *more, '--', *words])}{left}"


def _sizes(inner: Invocation, size: AskedSize) -> dict[str, str | int]:
    """The nodes and GPUs that a launcher's options name, if they are not those of the job."""
    by_meaning: dict[str, str] = {}
    for option in inner.options:
        meaning = inner.row.options.get(option.key, "")
        number = re.search(r"(?:[0-9]+[:-])?[0-9]+$", option.value)
        if number and meaning == known.NODES:
            by_meaning.setdefault(meaning, number[0].replace(":", "-"))
        elif number:  # srun's tasks are as many as GPUs, or one for torchrun
            values = (by_meaning.get(meaning, "0"), re.split("[:-]", number[0])[-1])
            by_meaning[meaning] = max(values, key=int)
    nodes = by_meaning.get(known.NODES, str(size.nodes.max))
    gpus, ranks = whole(by_meaning.get(known.GPUS)), whole(by_meaning.get(known.RANKS))
    count = whole(nodes)
    if gpus is None and ranks and count and ranks % count == 0:
        gpus = ranks // count
    sizes: dict[str, str | int] = {}
    if known.NODES in by_meaning and nodes != str(size.nodes):
        sizes["nodes"] = nodes
    if gpus and gpus != size.gpus:
        sizes["gpus"] = gpus
    elif any(inner.row.options.get(o.key) == known.GPUS and not whole(o.value)
             for o in inner.options) and not gpus:  # fmt: skip
        sizes["gpus"] = "N"
    return sizes


def _translated(inner: Invocation, size: AskedSize) -> tuple[list[str], list[str]]:
    """The options of hpcddp in place of a launcher's, and those of the launcher without one."""
    more, lost = list(inner.row.more.get(size.backend, ())), []
    if more and more[0] in size.sources.values():
        more = []
    for option in inner.options:
        meaning = inner.row.options.get(option.key, "")
        if not meaning:
            lost.append(option.text)
        elif meaning == known.ENV:
            assignment = option.value.replace(" ", "=", 1)
            more += ["--env", assignment] if "=" in assignment else []
        elif meaning.startswith("--"):
            name, _, text = meaning.partition(" ")
            if name in ("--sbatch", "--env") or name not in size.sources.values():
                more += [name, text.format(option.value)]
    return more, lost
