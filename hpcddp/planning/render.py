"""Step 5: facts -> script text.

A template gets facts, never ready-made strings. A value enters the text in one of two ways only:
as a `#SBATCH` line through `sbatch(name, value)`, quoted by sbatch's rules, or as a read-only shell
variable through `variables()`, quoted by the shell's. Any other `{{ value }}` is an error that
names the line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2

from hpcddp.errors import TemplateError
from hpcddp.keys import control_character

# Longest values that sbatch takes, in bytes.
LONGEST = {"job-name": 1024, "comment": 1024, "output": 4090, "error": 4090, "chdir": 4090}
LONGEST_SCRIPT = 4 * 2**20

_BARE = re.compile(r"[A-Za-z0-9_./:,@%+=^~*&|()\[\]-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Text(str):
    """Text that may stand in a script as it is."""


@dataclass
class TemplateContext:
    """All facts that a template gets, each under its name.

    Args:
        directives: sbatch options in order; True is a flag without a value.
        variables: name -> string, whole number or list of strings, for the shell.
        launcher: the fragment that starts the processes.
        ending: the fragment for the time after their end; empty for none.
        modules: whether the site loads modules.
        program: whether the ranks run a program of the user's.
        trackers: whether trackers get the run's metrics while it trains.
        backend: `slurm` or `local`.
        returns: whether the job may come back.
    """

    directives: list[tuple[str, Any]]
    variables: dict[str, str | int | Sequence[str]]
    launcher: str
    ending: str = ""
    modules: bool = False
    program: bool = False
    trackers: bool = False
    backend: str = "slurm"
    returns: bool = True


def check_text(value: str, where: str) -> str:
    """The value, if a script can hold it: no control character, no line end, valid Unicode."""
    if code := control_character(value):
        raise TemplateError(
            f"the value {value!r} holds a control character ({code})",
            where=where,
            hint="values enter a shell script: one line of plain text each",
        )
    return value


def sbatch(name: str, value: Any) -> Text:
    """One `#SBATCH` line, quoted by sbatch's rules; nothing at all for False.

    Inside double quotes sbatch takes everything as written but `"` and a backslash.
    """
    where = f"sbatch option {name}"
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise TemplateError("is not the long name of an sbatch option", where=where)
    if value is False:
        return Text()
    if value is True:
        return Text(f"#SBATCH --{name}")
    text = check_text(str(value), where)
    longest = LONGEST.get(name)
    if longest and len(text.encode()) > longest:
        raise TemplateError(f"is {len(text.encode())} bytes long, more than {longest}", where=where)
    if name in ("output", "error", "input") and "\\" in text:
        raise TemplateError("a backslash in a log's path is lost in sbatch", where=where,
                            hint="take another folder for the runs: --runs")  # fmt: skip
    if not _BARE.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return Text(f"#SBATCH --{name}={text}")


def variable(name: str, value: str | int | Sequence[str]) -> str:
    """One read-only shell variable; a list becomes an array."""
    if not _NAME.fullmatch(name):
        raise TemplateError("is not a name that the shell takes", where=f"variable {name!r}")
    if isinstance(value, str | int):
        return f"readonly {name}={shlex.quote(check_text(str(value), name))}"
    words = [shlex.quote(check_text(word, name)) for word in value]
    return f"readonly -a {name}=({' '.join(words)})"


def _finalize(value: Any) -> Any:
    """Jinja calls this on every `{{ value }}`."""
    if isinstance(value, Text | jinja2.Undefined):  # an undefined name has its own, better error
        return value
    raise TemplateError(
        f"a raw value ({value!r}) in the script",
        hint='values enter through sbatch(name, value) or variables(); then say "$NAME"',
    )


@jinja2.pass_context
def _finalize_late(context: Any, value: Any) -> Any:
    """With a context jinja checks constants late too, when the line is known."""
    return _finalize(value)


def environment(folders: Sequence[Path]) -> jinja2.Environment:
    """Jinja with strict names over template folders, the first match first."""
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(f) for f in folders]),
        undefined=jinja2.StrictUndefined,
        finalize=_finalize_late,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    # super() and macros return pieces that were checked one by one.
    jinja.concat = lambda pieces: Text("".join(pieces))  # type: ignore[method-assign]
    return jinja


def render(template: Path, shipped: Path, facts: TemplateContext) -> str:
    """The script's text.

    Args:
        template: the template's file; it may extend and include shipped ones and its neighbours.
        shipped: the folder of the shipped templates.

    Raises:
        TemplateError: names template, line and remedy.
    """
    template = template.resolve()
    try:
        text = _fill(template, shipped, facts)
    except TemplateError as error:
        error.where = ": ".join(filter(None, (_line(error.__traceback__), error.where)))
        raise
    except Exception as error:  # whatever an expression, or a file's bytes, can raise
        raise _translated(error, template) from None
    _check_script(text, str(template))
    return text


def _fill(template: Path, shipped: Path, facts: TemplateContext) -> str:
    """The template's text with the facts in it; an error of jinja's comes as it is."""
    # The root comes last, and names the template itself: it may have the name of what it extends.
    folders = [shipped, template.parent, Path("/")]
    loaded = environment(folders).get_template(str(template)[1:])

    def variables() -> Text:  # an error in it names the line that calls it
        return Text("\n".join(variable(name, value) for name, value in facts.variables.items()))

    return loaded.render({**vars(facts), "sbatch": sbatch, "variables": variables})


def _translated(error: Exception, template: Path) -> TemplateError:
    """An error of jinja's, or of an expression, with its place."""
    if isinstance(error, jinja2.TemplateNotFound):
        return TemplateError(f"unknown template {error.name!r}", where=str(template))
    if isinstance(error, jinja2.TemplateSyntaxError):
        where = f"{error.filename}:{error.lineno}"
        return TemplateError(error.message or "cannot be read", where=where)
    where = _line(error.__traceback__)
    if isinstance(error, jinja2.UndefinedError):
        names = "sbatch, variables, directives, launcher, ending, modules, program, trackers"
        hint = f"a template knows {names}, backend, returns"
        return TemplateError(error.message or "undefined name", where=where, hint=hint)
    return TemplateError(f"{type(error).__name__}: {error}", where=where or str(template))


def _line(trace: TracebackType | None) -> str:
    """FILE:LINE of the innermost template line in a traceback."""
    line = ""
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if not name.endswith((".py", ">")):  # jinja gives its frames the template's file
            line = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _check_script(text: str, template: str) -> None:
    """Refuse a script that sbatch would refuse, or of which it would silently ignore a line."""
    if len(text.encode()) > LONGEST_SCRIPT:
        raise TemplateError("the script is longer than 4 MiB, which sbatch refuses", where=template)
    if not text.startswith("#!"):
        raise TemplateError("the script does not begin with #!", where=template)
    begun = False
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or bool(line.strip() and not line.lstrip().startswith("#"))
        if re.match(r"\s*#+\s*SBATCH\b", line) and (begun or not line.startswith("#SBATCH ")):
            raise TemplateError(
                f"sbatch would ignore this line: {line.strip()}",
                where=f"{template}, line {number} of the script",
                hint="directives come first, each as {{ sbatch(name, value) }}",
            )
