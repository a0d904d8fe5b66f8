"""The man pages: one for each command, from its help. The text is man(7)."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import click

from hpcddp import __version__, cli

SIGNS = {"\\": "\\(rs", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
Section = tuple[str, list[tuple[str, str]]]  # a title, and its entries with their texts


def pages() -> dict[str, str]:
    """The name of each page -> its text; sub-commands have pages of their own, as git's have."""
    return {
        f"{context.command_path.replace(' ', '-')}.1": "\n".join(_page(context)) + "\n"
        for context in _contexts(click.Context(cli.cli, info_name="hpcddp", **_settings(cli.cli)))
    }


def _settings(command: click.Command) -> dict[str, list[str]]:
    return {"help_option_names": command.context_settings["help_option_names"]}


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """The contexts of a command and of all commands below it."""
    yield context
    for name, command in _below(context):
        yield from _contexts(click.Context(command, parent=context, info_name=name))


def _below(context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """The commands below a command, themselves instead of their entries."""
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            entry = command.get_command(context, name)
            if entry and not entry.hidden:
                yield name, entry.load() if isinstance(entry, cli.LazyCommand) else entry


def _page(context: click.Context) -> Iterator[str]:
    """The lines of a page."""
    command, path = context.command, context.command_path
    name = path.replace(" ", "-")
    yield f'.TH "{escaped(name.upper())}" "1" "" "hpcddp {escaped(__version__)}" "hpcddp"'
    yield from (".nh", ".ad l")  # no word of a command is cut
    yield from (".SH NAME", f"{escaped(name)} \\- {_summary(command)}")
    pieces = " ".join(command.collect_usage_pieces(context))
    yield from (".SH SYNOPSIS", f"\\fB{escaped(path)}\\fP {escaped(pieces)}")
    yield from (".SH DESCRIPTION", *_paragraphs(command.help or ""))
    for title, entries in (*_options(context), *_commands(context)):
        yield f".SH {title.upper()}"
        for term, text in entries:
            yield from (".TP", f"\\fB{escaped(term)}\\fP", _text(text) or "\\&")
    if command.epilog:
        yield from (".SH EXAMPLES", *_paragraphs(command.epilog))
    yield ".SH EXIT STATUS"
    for number, text in cli.EXIT_CODES.items():
        yield from (".TP", f"\\fB{number}\\fP", _text(text))
    yield from (".SH SEE ALSO", ", ".join(_others(context)))


def _summary(command: click.Command) -> str:
    """The first sentence of the help, as man pages have it: without a full stop."""
    sentence = re.split(r"(?<=\.)\s", " ".join((command.help or "").split()))[0]
    return _text(sentence[:1].lower() + sentence[1:].removesuffix("."))


def _options(context: click.Context) -> Iterator[Section]:
    """The options by the sections of the help; those without one come to the last."""
    sections: dict[str, list[tuple[str, str]]] = {}
    loose = []
    for option in context.command.get_params(context):
        record = option.get_help_record(context)
        if record is None or isinstance(option, click.Argument):
            continue
        section = getattr(option, "section", "")
        (sections.setdefault(section, []) if section else loose).append(record)
    sections.setdefault(next(reversed(sections), "Options"), []).extend(loose)
    for title, entries in sections.items():
        yield title if title == "Options" else f"{title} options", entries


def _commands(context: click.Context) -> Iterator[Section]:
    """The commands below; those of hpcddp itself in the groups of its help."""
    below = dict(_below(context))
    groups = cli.GROUPS if context.parent is None else {"Commands": tuple(below)}
    for title, names in groups.items():
        entries = [
            (f"{context.command_path} {name}", below[name].get_short_help_str(200))
            for name in names
            if name in below
        ]
        if entries:
            yield title if title == "Commands" else f"{title}: commands", entries


def _others(context: click.Context) -> Iterator[str]:
    """The pages of the commands above, below and of hpcddp."""
    above = context.parent
    names = [] if above is None else [above.command_path]
    names += [f"{context.command_path} {name}" for name, _ in _below(context)]
    for name in names:
        yield f"\\fB{escaped(name.replace(' ', '-'))}\\fP(1)"
    if context.parent is None:
        yield "\\fBsbatch\\fP(1)"


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of help; one that begins with click's mark keeps its lines."""
    for i, part in enumerate(re.split(r"\n\s*\n", text.partition("\f")[0].strip("\n "))):
        if i:
            yield ".PP"
        mark, _, rest = part.partition("\n")
        if mark.strip() == "\b":
            yield from (".nf", *map(_text, textwrap.dedent(rest).splitlines()), ".fi")
        else:
            yield _text(" ".join(part.split()))


def _text(text: str) -> str:
    """Help, whose code is between backticks, as one line of man(7)."""
    pieces = [escaped(piece) for piece in text.split("`")]
    if len(pieces) % 2:
        pieces[1::2] = [f"\\fB{piece}\\fP" for piece in pieces[1::2]]
        line = "".join(pieces)
    else:
        line = "\\(ga".join(pieces)
    return f"\\&{line}" if line.startswith(".") else line


def escaped(text: str) -> str:
    """Text without what roff would read, in ASCII."""
    signs = (SIGNS.get(sign, sign) for sign in text)
    return "".join(sign if sign.isascii() else f"\\[u{ord(sign):04X}]" for sign in signs)
