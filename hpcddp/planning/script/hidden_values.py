"""Values in a command that look like secrets: by the name before them, or by their form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hpcddp import urls

MARK = "..."  # no shell quotes it
_NAMES = (
    r"(?:token|secret|passw(?:or)?d|passphrase|pwd|credentials?|cookie|signature"
    r"|(?:api|access|private|secret|account|auth|ssh|encryption|wandb|license)[-_.]?key"
    r"|(?<![a-z])(?:auth|key|pat))"
)
_OPTION = re.compile(rf"--?[\w.-]*{_NAMES}", re.IGNORECASE)
# NAME=VALUE, NAME: VALUE, "NAME": "VALUE" and --NAME VALUE in a word, such as that of bash -c.
_NAMED = re.compile(
    rf"""([\w.-]*{_NAMES}["']?\s*[=:]\s*["']?|--[\w.-]*{_NAMES}\s+["']?)[^\s"',;&|)}}\]]+""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b((?:bearer|basic)\s+)[\w.~+/=-]+", re.IGNORECASE)
_FORMS = re.compile(
    r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|sk-|pk-|AKIA|ASIA|eyJ)[\w.-]{12,}"
    # 32 letters and digits or more, both: a hash or random bytes, and no word.
    r"|(?<![\w/.-])(?=\w*\d)(?=\w*[A-Za-z])[A-Za-z0-9]{32,}={0,2}(?![\w/.-])"
)


def hidden_words(words: Iterable[str]) -> Iterator[str]:
    """The words of a command without values that look like secrets."""
    named = False
    for word in words:
        if named and not word.startswith("--"):
            yield MARK
            named = False
            continue
        named = bool(_OPTION.fullmatch(word))
        yield hidden(word)


def hidden(text: str) -> str:
    """A text without values that look like secrets."""
    text = urls.hidden(text, MARK)
    text = _BEARER.sub(rf"\1{MARK}", text)
    return _FORMS.sub(MARK, _NAMED.sub(rf"\1{MARK}", text))
