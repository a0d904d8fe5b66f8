"""Errors of a command, as a message or as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import click

from hpcddp.cli.terminal.say import json_asked, paint
from hpcddp.errors import HpcddpError, UserError

SCHEMA_VERSION = 1
INTERRUPTED = 130
FEW = 8  # commands that an error lists; more are in the help


class Failure(NamedTuple):
    """An error in parts, for the user.

    Args:
        kind: the name of its class.
    """

    kind: str
    error: HpcddpError
    exit_code: int

    def to_dict(self) -> dict[str, Any]:
        """The error as plain data."""
        facts = {"what": self.error.what, "where": self.error.where, "hint": self.error.hint}
        error = {"kind": self.kind, **facts, "exit_code": self.exit_code}
        return {"schema_version": SCHEMA_VERSION, "error": error}


def report(error: BaseException) -> int:
    """Print an error, to stdout as JSON or to stderr as a message; its exit code."""
    failure = of(error)
    if json_asked():
        try:
            click.echo(json.dumps(failure.to_dict()))
            sys.stdout.flush()
            return failure.exit_code
        except OSError:  # stdout itself has failed
            pass
    label = paint("error:", "red", sys.stderr)
    click.echo(f"{label} {failure.error}" if failure.kind != "Interrupted" else "interrupted",
               err=True)  # fmt: skip
    return failure.exit_code


def of(error: BaseException) -> Failure:
    """The parts of an error."""
    kind = type(error).__name__
    if isinstance(error, HpcddpError):
        return Failure(kind, error, error.exit_code)
    if isinstance(error, click.ClickException):
        return Failure(kind, _usage(error), error.exit_code)
    if isinstance(error, OSError):
        what, where = error.strerror or str(error), str(error.filename or "")
        return Failure("OSError", HpcddpError(what, where=where), 1)
    return Failure("Interrupted", HpcddpError("interrupted"), INTERRUPTED)


def _usage(error: click.ClickException) -> UserError:
    """An error of click's in our form: a message without capital and full stop, then a hint."""
    ctx = getattr(error, "ctx", None)
    close = getattr(error, "possibilities", None) or []
    message, _, hint = (error.message if close else error.format_message()).partition("\n")
    what = message[:1].lower() + message[1:].rstrip(".")
    where = ctx.command_path if ctx else ""
    hint = hint.strip() or (f"did you mean {close[0]}?" if close else "")
    if ctx and not hint and isinstance(ctx.command, click.Group):
        names = ctx.command.commands
        hint = f"use one of {', '.join(names)}" if len(names) <= FEW else ""
    if ctx and not hint:
        usage = " ".join(ctx.get_usage().split())
        hint = f"{usage[:1].lower()}{usage[1:]} (`{where} --help` explains it)"
    return UserError(what, where=where, hint=hint)
