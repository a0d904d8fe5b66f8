"""Names, logs and metrics as text that is safe for a terminal."""

from __future__ import annotations

import locale
import os
import re
import sys

COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # and all other CSI sequences of ECMA-48
SELECTORS = re.compile(r"[\ufe00-\ufe0f]")  # terminals disagree on the width of such a character


def shown(text: str, plain: bool = False) -> str:
    """One line that is safe for a terminal: control characters are shown by their numbers.

    Args:
        plain: only ASCII.
    """
    text = SELECTORS.sub("", COLOUR.sub("", text)).expandtabs()
    if not text.isprintable():
        text = "".join(map(_visible, text))
    return text.encode("ascii", "backslashreplace").decode() if plain else text


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\n\xa0\u3000" else ascii(character)[1:-1]


def only_ascii() -> bool:
    """Whether the terminal, or the reader of the output, may support only ASCII.

    Python replaces the locale C by C.UTF-8; that says nothing about the terminal.
    """
    every, ctype, lang = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    coerced = ctype == "C.UTF-8" and every == "" and lang in ("", "C", "POSIX")
    names = (locale.getencoding(), sys.stdout.encoding or "")
    known = all(name.lower().replace("-", "") == "utf8" for name in names)
    return coerced or not known or os.environ.get("TERM") == "dumb"
