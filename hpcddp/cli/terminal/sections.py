"""The help of a command: its options in named sections, and examples at its end."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])  # a function that gets options


class SectionOption(click.Option):
    """An option with the name of its section in the help."""

    def __init__(self, *names: Any, section: str = "", **more: Any) -> None:
        super().__init__(*names, **more)
        self.section = section


def option(section: str, *names: str, **more: Any) -> Callable[[F], F]:
    """`click.option` in a section of the help."""
    return click.option(*names, cls=SectionOption, section=section, **more)


class SectionCommand(click.Command):
    """A command whose help has sections. Each line of its epilog is an example."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section; those without one, such as --help, come to the last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        loose: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or isinstance(param, click.Argument):
                continue
            section = getattr(param, "section", "")
            (sections.setdefault(section, []) if section else loose).append(record)
        last = next(reversed(sections), "Options")
        sections.setdefault(last, []).extend(loose)
        width = max(len(names) for records in sections.values() for names, _ in records)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl([(f"{names:{width}}", text) for names, text in records])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in inspect.cleandoc(self.epilog).splitlines():
                    formatter.write(f"  {line}\n" if line != "\b" else "")
