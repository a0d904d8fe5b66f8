"""Completion in the shell: the values of options, and bash's view of a word with `=` in it."""

from __future__ import annotations

import os
from typing import Any

from click import Context, Parameter
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    split_arg_string,
)


def strategies(ctx: Context, parameter: Parameter, begun: str) -> list[CompletionItem[str]]:
    """Strategies; after a comma those that are not there yet."""
    from hpcddp.strategy import STRATEGIES

    before, comma, word = begun.rpartition(",")
    named = {part.partition("=")[0] for part in before.split(",")}
    return [
        CompletionItem(before + comma + name, help=row.what)
        for name, row in STRATEGIES.items()
        if name.startswith(word) and name not in named and (not comma or row.factor)
    ]


def launchers(ctx: Context, parameter: Parameter, begun: str) -> list[CompletionItem[str]]:
    """Launchers."""
    from hpcddp.launch.launchers import LAUNCHERS

    rows = LAUNCHERS.items()
    return [CompletionItem(n, help=row.text) for n, row in rows if n.startswith(begun)]


def clusters(ctx: Context, parameter: Parameter, begun: str) -> list[CompletionItem[str]]:
    """Profiles by their names, or paths of profiles."""
    from hpcddp.planning.clusters import folders

    if "/" in begun:
        return [CompletionItem(begun, type="file")]
    names = {path.stem for folder in folders(os.environ) for path in folder.glob("*.toml")}
    return [CompletionItem(n) for n in sorted({"auto", *names}) if n.startswith(begun)]


def settings(ctx: Context, parameter: Parameter, begun: str) -> list[CompletionItem[str]]:
    """Keys of a job with `=`; behind it the values that a key can have."""
    from hpcddp.spec import KEYS

    name, equals, value = begun.partition("=")
    if equals:
        row = KEYS.rows.get(name)
        choices = ("true", "false") if row and row.kind == "bool" else row.choices if row else ()
        return [CompletionItem(f"{name}={c}") for c in choices if c.startswith(value)]
    return [
        CompletionItem(n + ("." if n in KEYS.tables else "="), help=row.text)
        for n, row in KEYS.rows.items()
        if n.startswith(begun)
    ]


def keys(ctx: Context, parameter: Parameter, begun: str) -> list[CompletionItem[str]]:
    """Keys of jobs and of cluster profiles."""
    from hpcddp.planning.clusters import KEYS as CLUSTER
    from hpcddp.spec import KEYS

    names = dict.fromkeys([*KEYS.rows, *CLUSTER.rows])
    return [CompletionItem(name) for name in names if name.startswith(begun)]


BASH = """\
%(complete_func)s() {
    local IFS=$'\\n'
    local line type value
    COMPREPLY=()
    for line in $(env COMP_WORDS="${COMP_LINE:0:$COMP_POINT}" COMP_CWORD="$COMP_CWORD" \\
            COMP_CURRENT="${COMP_WORDS[$COMP_CWORD]}" %(complete_var)s=bash_complete $1); do
        IFS=',' read -r type value <<< "$line"
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            part) COMPREPLY+=("$value"); compopt -o nospace ;;
            *) COMPREPLY+=("$value") ;;
        esac
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class WholeWords(BashComplete):
    """Completion in bash, which splits words at `=` and `:` and replaces the last piece alone."""

    source_template = BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """The whole words before the cursor, and the one at the cursor."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        self.word = "" if not line or line[-1].isspace() else words.pop()
        piece = os.environ.get("COMP_CURRENT", self.word).lstrip("=:")
        self.kept = len(self.word) - (len(piece) if self.word.endswith(piece) else len(self.word))
        return words[1:], self.word

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """The type of a completion, and its text in place of the last piece."""
        option, equals, _ = self.word.partition("=")
        before = option + equals if equals and option.startswith("--") else ""
        kind = "part" if item.type == "plain" and item.value[-1:] in ("=", ".") else item.type
        return f"{kind},{(before + item.value)[self.kept :]}"


def register() -> None:
    """Make bash use `WholeWords`."""
    add_completion_class(WholeWords, "bash")
