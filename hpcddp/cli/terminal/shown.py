"""Text of a run on a terminal: names, logs and metrics are not trusted to leave it alone."""

from __future__ import annotations

import locale
import os
import re
import sys

COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # and the rest of what ECMA-48 calls CSI
SELECTORS = re.compile(r"[\ufe00-\ufe0f]")  # terminals disagree on how wide they make a character


def shown(text: str, plain: bool = False) -> str:
    """One line that is safe for a terminal: a control character is shown by its number.

    Args:
        plain: in ASCII alone.
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
    """Whether the terminal, or the reader of the output, may know nothing but ASCII.

    Python takes C.UTF-8 for the locale C on its own; that says nothing of the terminal.
    """
    every, ctype, lang = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    coerced = ctype == "C.UTF-8" and every == "" and lang in ("", "C", "POSIX")
    names = (locale.getencoding(), sys.stdout.encoding or "")
    known = all(name.lower().replace("-", "") == "utf8" for name in names)
    return coerced or not known or os.environ.get("TERM") == "dumb"
