"""Help: commands in groups, options in sections, and one metavar for one thing."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import click
import pytest
from sites import Outcome, Site
from terminal import Terminal

from hpcddp.cli import COMMANDS, GROUPS, LazyCommand, cli
from hpcddp.cli import run as run_command
from hpcddp.cli.cluster.doctor_command import REFUSED as OF_DOCTOR
from hpcddp.cli.control import REFUSED as OF_RESUME
from hpcddp.cli.weights import REFUSED as OF_IMPORT

Command = Callable[..., Outcome]
METAVARS = {
    "RUN", "JOB", "FILE", "FOLDER", "N", "NAME", "KEY=VALUE", "TIME", "SIZE", "STRATEGY",
    "LAUNCHER", "CLUSTER", "SECONDS", "HOSTS", "[KEY]", "GPUS",
}  # fmt: skip


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command, those of groups too."""
    for name, entry in cli.commands.items():
        assert isinstance(entry, LazyCommand)
        command = entry.load()
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {own}", sub) for own, sub in command.commands.items())


def options(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


def sections(text: str) -> dict[str, list[str]]:
    """The sections of a help text, with the first word of each entry."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if re.fullmatch(r"\w+:", line):
            found[line[:-1]] = []
        elif found and re.match(r"  \S", line):
            found[list(found)[-1]].append(line.split()[0].rstrip(","))
    return found


def test_commands_are_listed_in_groups(site: Site, hpcddp: Command) -> None:
    listed = sections(hpcddp("--help").out)
    assert list(listed) == ["Options", "Start", "Observe", "Control", "Prepare", "Cluster"]
    assert {group: tuple(names) for group, names in listed.items() if group != "Options"} == GROUPS
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)


def test_hpcddp_alone_prints_its_help(site: Site, command: Command) -> None:
    alone, asked = command(), command("--help")
    assert (alone.code, alone.out, alone.err) == (0, asked.out, "")
    assert command("sandbox").code == 0


def test_the_options_of_submit_are_in_sections_and_examples_end_its_help(
    site: Site, hpcddp: Command
) -> None:
    text = hpcddp("submit", "--help").out
    listed = sections(text)
    assert list(listed) == ["Resources", "Slurm", "Job", "Output", "Examples"]
    assert "-N" in listed["Resources"] and "-p" in listed["Slurm"] and "--set" in listed["Job"]
    assert {"--dry-run", "--json", "-h"} <= set(listed["Output"])
    assert re.search(r"Examples:\n  hpcddp submit .+\n  hpcddp submit .+ -- python .+\n$", text)


def test_one_thing_has_one_metavar(site: Site) -> None:
    used = defaultdict(set)
    for _, command in commands():
        for option in options(command):
            if not option.is_flag and not isinstance(option.type, click.Choice):
                used[option.opts[-1]].add(option.make_metavar(click.Context(command)))
    several = {name: metavars for name, metavars in used.items() if len(metavars) > 1}
    assert several.keys() <= {"--strategy", "--gpus"}  # of a job, GPUs may have a type
    assert {metavar for metavars in used.values() for metavar in metavars} <= METAVARS


def test_help_lines_are_sentences(site: Site) -> None:
    texts = {(name, ""): command.help or "" for name, command in commands()}
    texts |= {
        (name, option.opts[-1]): re.sub(r"  \[.*\]$", "", option.help or "")
        for name, command in commands()
        for option in options(command)
    }
    first = {where: text.strip().partition("\n\n")[0].strip() for where, text in texts.items()}
    assert [
        f"{' '.join(where)}: {text}"
        for where, text in first.items()
        if not re.fullmatch(r"(?s)(?:[A-Z]|`|auto).*(?:\.|[.:]\n.*)", text)
    ] == []


@pytest.mark.parametrize(
    ("command", "refused", "words"),
    [
        ("run", run_command.REFUSED, []),
        ("resume", OF_RESUME, ["last"]),
        ("import", OF_IMPORT, ["weights.pt"]),
        ("doctor", OF_DOCTOR, []),
    ],
)
def test_options_that_a_command_refuses_are_not_in_its_help(
    site: Site, hpcddp: Command, command: str, refused: dict[str, tuple[str, str]], words: list[str]
) -> None:
    text = hpcddp(command, "--help").out
    for option, (what, hint) in refused.items():
        assert not re.search(rf"{option}\b", text)
        value = [] if option.startswith("--no-") else ["1" if option == "--spares" else "A=1"]
        done = hpcddp(command, *words, option, *value)
        assert (done.code, done.out) == (2, "")
        assert done.err == f"error: {option}: {what}\n  {hint}\n"
    assert not site.runs.exists()


@pytest.mark.parametrize("arguments", [[], ["submit"], ["config"]])
def test_help_is_whole_in_40_columns(site: Site, arguments: list[str]) -> None:
    with Terminal(*arguments, "--help", columns=40, lines=200) as terminal:
        assert terminal.left() == 0
        _, _, text = terminal.text.partition("\n\n")  # behind the usage
    words = " ".join(text.partition("Examples:")[0].split())
    assert "..." not in words.replace("pp=2,ddp=4, ...", "")
    if not arguments:
        assert all(row.text in words for row in COMMANDS.values())
    else:
        assert "Show this message and exit." in words
