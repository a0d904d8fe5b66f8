"""Step 5: facts -> script text.

A template gets facts (template_facts.py), never ready-made strings. A value enters the text in one
of three ways: as a `#SBATCH` line through `sbatch(name, value)`, quoted as sbatch requires, as a
read-only shell variable through `variables()`, quoted for the shell, or as a comment through
`header()`. Any other `{{ value }}` is an error that names the line.
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
from hpcddp.planning.script.header import comment
from hpcddp.planning.software.software_facts import SoftwareFacts
from hpcddp.planning.template_facts import FACTS

# Longest values that sbatch accepts, in bytes.
LONGEST = {"job-name": 1024, "comment": 1024, "output": 4090, "error": 4090, "chdir": 4090}
LONGEST_SCRIPT = 4 * 2**20

_BARE = re.compile(r"[A-Za-z0-9_./:,@%+=^~*&|()\[\]-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Text(str):
    """Text that enters a script unchanged."""


@dataclass
class TemplateContext:
    """All facts that a template gets, each under its name; FACTS describes them.

    Args:
        variables: name -> string, whole number or list of strings, for the shell.
        header: the lines of the first comment.
    """

    directives: list[tuple[str, Any]]
    variables: dict[str, str | int | Sequence[str]]
    launcher: str
    ending: str = ""
    header: Sequence[str] = ()
    software: SoftwareFacts = SoftwareFacts()
    program: bool = False
    trackers: bool = False
    backend: str = "slurm"
    returns: bool = True
    here: bool = False
    no_kill: bool = False
    preflight: bool = False


def check_text(value: str, where: str) -> str:
    """The value, if it is one line of valid Unicode without control characters."""
    if code := control_character(value):
        raise TemplateError(
            f"the value {value!r} contains a control character ({code})",
            where=where,
            hint="it enters a shell script: use one line of plain text",
        )
    return value


def sbatch(name: str, value: Any) -> Text:
    """One `#SBATCH` line, quoted as sbatch requires; no line for False.

    Inside double quotes sbatch changes only `"` and a backslash.
    """
    where = f"sbatch option {name}"
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        hint = "use the long name without dashes, such as constraint"
        raise TemplateError("is not the long name of an sbatch option", where=where, hint=hint)
    if value is False:
        return Text()
    if value is True:
        return Text(f"#SBATCH --{name}")
    text = check_text(str(value), where)
    longest = LONGEST.get(name)
    if longest and len(text.encode()) > longest:
        what = f"is {len(text.encode())} bytes long, but sbatch accepts {longest}"
        raise TemplateError(what, where=where, hint="use a shorter value")
    if name in ("output", "error", "input") and "\\" in text:
        raise TemplateError("a backslash is not allowed in a path", where=where,
                            hint="use another path, for runs with --runs")  # fmt: skip
    if not _BARE.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return Text(f"#SBATCH --{name}={text}")


def variable(name: str, value: str | int | Sequence[str]) -> str:
    """One read-only shell variable; a list becomes an array."""
    if not _NAME.fullmatch(name):
        hint = "use letters, digits and _, and no digit first"
        raise TemplateError("is not a shell variable's name", where=f"variable {name!r}", hint=hint)
    if isinstance(value, str | int):
        return f"readonly {name}={shlex.quote(check_text(str(value), name))}"
    words = [shlex.quote(check_text(word, name)) for word in value]
    return f"readonly -a {name}=({' '.join(words)})"


def _finalize(value: Any) -> Any:
    """Jinja calls this on every `{{ value }}`."""
    if isinstance(value, Text | jinja2.Undefined):  # jinja's error for an undefined name is better
        return value
    raise TemplateError(
        f"the value {value!r} is not allowed here",
        hint='use sbatch(name, value), or a shell variable of variables() as "$NAME"',
    )


@jinja2.pass_context
def _finalize_late(context: Any, value: Any) -> Any:
    """With a context, jinja also checks constants late, when the line is known."""
    return _finalize(value)


def environment(folders: Sequence[Path]) -> jinja2.Environment:
    """Jinja with strict names and template folders, in the order of the search."""
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(f) for f in folders]),
        undefined=jinja2.StrictUndefined,
        finalize=_finalize_late,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    # super() and macros return text whose values have been checked.
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
    except Exception as error:  # of any expression, or of a file that is not text
        raise _translated(error, template) from None
    _check_script(text, str(template))
    return text


def _fill(template: Path, shipped: Path, facts: TemplateContext) -> str:
    """The template's text with the facts; errors of jinja are not translated."""
    # The template is found below the last folder, since it may have the name of what it extends.
    folders = [shipped, template.parent, Path("/")]
    loaded = environment(folders).get_template(str(template)[1:])

    def variables() -> Text:  # an error in it names the calling line
        return Text("\n".join(variable(name, value) for name, value in facts.variables.items()))

    def header() -> Text:
        return Text("\n".join(comment(line) for line in facts.header))

    functions = {"sbatch": sbatch, "variables": variables, "header": header}
    return loaded.render({**vars(facts), **functions})


def _translated(error: Exception, template: Path) -> TemplateError:
    """An error of jinja or of an expression, with its place."""
    if isinstance(error, jinja2.TemplateNotFound):
        hint = "fix the name in `extends` or `include`"
        return TemplateError(f"unknown template {error.name!r}", where=str(template), hint=hint)
    if isinstance(error, jinja2.TemplateSyntaxError):
        where = f"{error.filename}:{error.lineno}"
        hint = "fix the template's syntax"
        return TemplateError(error.message or "invalid template", where=where, hint=hint)
    where = _line(error.__traceback__)
    if isinstance(error, jinja2.UndefinedError):
        hint = f"the names of a template are {', '.join(FACTS)}"
        return TemplateError(error.message or "undefined name", where=where, hint=hint)
    return TemplateError(f"{type(error).__name__}: {error}", where=where or str(template))


def _line(trace: TracebackType | None) -> str:
    """FILE:LINE of the innermost template line in a traceback."""
    line = ""
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if not name.endswith((".py", ">")):  # jinja's frames have the template's file name
            line = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _check_script(text: str, template: str) -> None:
    """Refuse a script that sbatch refuses, or of which it ignores a line."""
    if len(text.encode()) > LONGEST_SCRIPT:
        hint = "shorten the template or its values"
        what = "the script is longer than 4 MiB, which sbatch refuses"
        raise TemplateError(what, where=template, hint=hint)
    if not text.startswith("#!"):
        hint = "start the template with #!/bin/bash, or extend slurm.sh.j2"
        raise TemplateError("the script does not begin with #!", where=template, hint=hint)
    begun = False
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or bool(line.strip() and not line.lstrip().startswith("#"))
        if re.match(r"\s*#+\s*SBATCH\b", line) and (begun or not line.startswith("#SBATCH ")):
            raise TemplateError(
                f"sbatch would ignore this line: {line.strip()}",
                where=f"{template}, line {number} of the script",
                hint="write {{ sbatch(name, value) }} before the first command",
            )
