"""The blocks of README and of the site's pages, and how they are marked.

A page is one story: its blocks are followed from top to bottom in one folder (page_reader.py).
A mark is an HTML comment before the fence, `<!-- KEY: VALUE -->`, that no reader sees. What a block
is without a mark follows from its language:

    console   `$ ` and `# ` begin commands. A line that ends with a backslash goes on, and so does a
              command where a line begins with `> `. Other lines are expected output. `$ ` runs
              without Slurm, `# ` on the sandbox
    python    a script of its own; with `# PATH.py` in its first line that file
    toml      a part of a job file; with `# PATH.toml` that file
    jinja     a part of a template; with `{# PATH #}` that file
    diff      with `--- PATH` and `+++ PATH` at its top: the next console block runs with both texts
    json      is parsed
    text      output or a picture

    file: PATH        it is this file           add: PATH       it is appended to this file
    setup: LINES      lines before the script   compile: REASON the script is only compiled
    of: cluster       a part of a profile       exit: N         the last command's exit code
    slurm: stand-in   small programs answer in place of Slurm's; nothing trains
    slurm: sandbox    it needs the sandbox
    for: 10 seconds   the last command is interrupted after this time
    until: TEXT       it is interrupted when this text has appeared
    long: 3 minutes   it runs with scripts/test --full alone
    not run: REASON   it needs another cluster, an account or the network
    page: sandbox     anywhere on a page: all its blocks need the sandbox
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sites import CHECKOUT

LANGUAGES = ("console", "python", "toml", "jinja", "diff", "json", "text")
MARKS = (
    "file", "add", "setup", "compile", "of", "exit", "slurm", "for", "until", "long", "not run",
    "page",
)  # fmt: skip
HERE, STAND_IN, SANDBOX = "here", "stand-in", "sandbox"  # where a block runs
NOT_RUN = "not run"

_COMMENT = r"<!--(?:(?!-->).)*-->"
_BLOCK = re.compile(
    rf"(?P<comments>(?:{_COMMENT}\s*)*)^(?P<indent>[ ]*)(?P<fence>`{{3,}})(?P<language>[^\n`]*)\n"
    r"(?P<text>.*?)^[ ]*(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"<!--\s*([a-z ]+):(.*?)-->", re.DOTALL)
# The first line of a block that is a file.
_NAMED = re.compile(r"(?:# |\{# )(?P<path>[\w./~-]*\w\.(?:py|toml|j2|sh|json))(?: #\})?$")
_PAIR = re.compile(r"--- (?P<path>\S+)\n\+\+\+ (?P=path)\n")
_SANDBOX_ONLY = re.compile(r"^# |\bhpcddp (?:sandbox|rehearse)\b", re.MULTILINE)


@dataclass
class Step:
    """A command of a console block, and the lines that it shall print."""

    command: str
    expected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def path(self) -> str:
        """The file that the block is; "" for none."""
        if marked := self.marks.get("file") or self.marks.get("add"):
            return marked
        named = (_PAIR if self.language == "diff" else _NAMED).match(self.first)
        return named["path"] if named else ""

    @property
    def first(self) -> str:
        """The lines that can name a file."""
        return self.text if self.language == "diff" else self.text.partition("\n")[0]

    @property
    def where(self) -> str:
        """Where it runs."""
        if "not run" in self.marks:
            return NOT_RUN
        if where := self.marks.get("slurm") or self.marks.get("page"):
            return where
        if self.language == "console" and _SANDBOX_ONLY.search(self.text):
            return SANDBOX
        return HERE

    def side(self, mark: str) -> str:
        """One text of a diff: of the lines with `-` or of those with `+`."""
        lines = _PAIR.sub("", self.text, count=1).splitlines()
        return "".join(line[1:] + "\n" for line in lines if line[:1] in ("", " ", mark))

    def steps(self) -> list[Step]:
        """The commands of a console block."""
        steps: list[Step] = []
        goes_on = False
        for line in self.text.splitlines():
            if goes_on or (steps and line.startswith("> ")):
                steps[-1].command += "\n" + line.removeprefix("> ")
            elif line.startswith(("$ ", "# ")):
                steps.append(Step(line[2:]))
            elif steps:
                steps[-1].expected.append(line)
            else:
                raise AssertionError(f"{self}: {line!r} comes before any command")
            goes_on = line.endswith("\\") and not steps[-1].expected
        return steps


def pages() -> list[Path]:
    """README and every page of the site."""
    found = sorted((CHECKOUT / "docs").rglob("*.md"))
    return [CHECKOUT / "README.md", *(path for path in found if "_build" not in path.parts)]


def name(page: Path) -> str:
    return page.relative_to(CHECKOUT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, but for those that only Sphinx reads."""
    return list(parse(page.read_text(encoding="utf-8"), name(page)))


def parse(text: str, page: str) -> Iterator[Block]:
    whole = re.search(r"<!--\s*page:\s*(\S+)\s*-->", text)
    for match in _BLOCK.finditer(text):
        language, line = match["language"].strip(), text.count("\n", 0, match.start("fence")) + 1
        if language.startswith("{"):
            continue
        marks = {key.strip(): value.strip() for key, value in _MARK.findall(match["comments"])}
        if whole:
            marks.setdefault("page", whole[1])
        indent = match["indent"]
        lines = [row.removeprefix(indent) for row in match["text"].splitlines()]
        yield Block(page, line, language, "".join(f"{row}\n" for row in lines), marks)


def wrong(block: Block) -> str:
    """Why a test cannot follow a block; "" if it can."""
    if block.language not in LANGUAGES:
        return f"{block}: language {block.language!r}; known: {', '.join(LANGUAGES)}"
    if unknown := [mark for mark in block.marks if mark not in MARKS]:
        return f"{block}: unknown mark {unknown[0]!r}"
    if block.where not in (HERE, STAND_IN, SANDBOX, NOT_RUN):
        return f"{block}: no place {block.where!r}"
    if any(not block.marks.get(mark, "a reason") for mark in ("not run", "compile")):
        return f"{block}: the reason is missing"
    return ""


# What differs from run to run, and what stands for it in a pattern.
_VARIES = (
    (r"\.\.\.", ".*"),
    (r"-\d{8}-\d{4}-[0-9a-f]{4}\b", r"-\\d{8}-\\d{4}-[0-9a-f]{4}"),  # a run
    (r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b", r"[0-9a-f]+"),
    (r"(?<![\w.])[/~](?:[\w.@+-]+/)+", r"\\S*/"),  # the folders of a path
    (r"\b(?:n|login)(?:\d+\b|\[[\d,-]+\])", r"\\S+"),  # a host, or several
    (r"(?:(?<!\w)[-+])?\d+(?:\.\d+)?(?:e[-+]?\d+)?", r"[-+]?\\d+(?:\\.\\d+)?(?:e[-+]?\\d+)?"),
    (r"\s+", r"\\s+"),
)
_ANY = re.compile("|".join(f"(?P<v{i}>{pattern})" for i, (pattern, _) in enumerate(_VARIES)))


def pattern(line: str) -> re.Pattern[str]:
    """What a line of expected output stands for."""
    made, at = "", 0
    for match in _ANY.finditer(line.strip()):
        made += re.escape(line.strip()[at : match.start()])
        made += _VARIES[int((match.lastgroup or "v0")[1:])][1].replace("\\\\", "\\")
        at = match.end()
    return re.compile(made + re.escape(line.strip()[at:]))


def missing(expected: list[str], output: str) -> str:
    """The first expected line that the output does not have behind those before it; "" for none."""
    rows = iter(row.strip() for row in output.splitlines())
    for line in expected:
        if line.strip() in ("", "...", "^C"):
            continue
        wanted = pattern(line)
        if not any(wanted.fullmatch(row) for row in rows):
            return line
    return ""
