"""The command line: it parses, calls one function of a room below, and prints.

It imports all rooms below, and ``train`` in one module alone (``weights``).

Its folders `cluster` and `inside` have the commands about clusters and those into a running job,
and `terminal` draws for all commands.

A module is imported when one of its commands is called. Results go to stdout, everything else to
stderr.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from keyword import iskeyword
from typing import Any, NamedTuple

import click

from hpcddp import __version__
from hpcddp.errors import HpcddpError

EXIT_CODES = {
    0: "done",
    1: "the job or the tool failed",
    2: "usage or job file",
    3: "Slurm unreachable",
    4: "partly done",
    130: "interrupted by Ctrl-C",
}
NARROW = 52  # columns below which click would write help wider than the terminal


class Row(NamedTuple):
    """A command: the module that holds it, its group in the help, and its line there."""

    module: str
    group: str
    text: str


# A name that is a Python keyword has "_" at the end of its function's name.
COMMANDS = {
    "submit": Row("submit", "Start", "Submit a training job, or run it on this machine."),
    "init": Row("cluster.init_command", "Start", "Write a job file for the script in this folder."),
    "run": Row("run", "Start", "Train in this process, for a debugger."),
    "render": Row("show", "Start", "Print the script of a job, for sbatch."),
    "resume": Row("control", "Start", "Continue an ended run."),
    "import": Row("weights", "Start", "Submit a job that starts from a file of weights."),
    "ls": Row("runs", "Observe", "List runs."),
    "status": Row("runs", "Observe", "Show state, progress and pending reason of a run."),
    "logs": Row("logs", "Observe", "Print the log of a run."),
    "watch": Row("watch", "Observe", "Show a run live in the terminal."),
    "why": Row("why", "Observe", "Show why each attempt of a run ended, and its cost."),
    "report": Row("report", "Observe", "Write a report of runs to an HTML file."),
    "dashboard": Row("dashboard", "Observe", "Show all runs live in a browser."),
    "track": Row("track", "Observe", "Send unsent metrics to trackers."),
    "stacks": Row("inside.stacks_command", "Observe", "Show where each rank is in its code, now."),
    "export": Row("weights", "Observe", "Write the weights of a run to a file."),
    "stop": Row("control", "Control", "Save a checkpoint, then end a run."),
    "preempt": Row("control", "Control", "Save a checkpoint, then requeue a run."),
    "cancel": Row("control", "Control", "End a run at once."),
    "shell": Row("inside.shell_command", "Control", "Start a shell beside a rank of a run."),
    "plan": Row("plan", "Prepare", "Estimate GPU memory and traffic of each strategy."),
    "ranks": Row("ranks", "Prepare", "Print the map of nodes, GPUs and ranks."),
    "config": Row("show", "Prepare", "Print or explain the keys of a job."),
    "strategies": Row("strategies", "Prepare", "Train with each strategy for a few steps."),
    "cluster": Row("cluster.cluster_command", "Cluster", "Describe a Slurm cluster in a profile."),
    "doctor": Row("cluster.doctor_command", "Cluster", "Check this machine and some nodes."),
    "nodes": Row("cluster.nodes_command", "Cluster", "Show and choose the nodes that jobs avoid."),
    "sandbox": Row("sandbox", "Cluster", "Start and stop a Slurm on this machine."),
    "rehearse": Row("rehearse", "Cluster", "Test how a job survives preemptions and failures."),
}
# Group -> its commands, in the order of the help.
GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(name for name, row in COMMANDS.items() if row.group == group)
    for group in ("Start", "Observe", "Control", "Prepare", "Cluster")
}


class LazyCommand(click.Command):
    """An entry of the command table that imports its command when it is called.

    Help, completion and "did you mean" use it like any other command.
    """

    def __init__(self, name: str, row: Row) -> None:
        super().__init__(name, help=row.text, short_help=row.text, add_help_option=False)
        self.module = row.module

    def load(self) -> click.Command:
        """Import the command."""
        name = self.name or ""
        attribute = f"{name}_" if iskeyword(name) else name
        command: click.Command = getattr(import_module(f"hpcddp.cli.{self.module}"), attribute)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return self.load().make_context(*args, **kwargs)


class GroupedCommands(click.Group):
    """A group whose help lists its commands in groups."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands: the names in columns of one width, no text cut."""
        width = max(map(len, COMMANDS))
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{n:{width}}", COMMANDS[n].text) for n in names])


@click.group(
    cls=GroupedCommands,
    commands={name: LazyCommand(name, row) for name, row in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="hpcddp", help="Show the version and exit.")
def cli() -> None:
    """Run distributed PyTorch training on Slurm, or on this machine.

    \b
      hpcddp submit --nodes 2 --gpus 4     train on 2 nodes x 4 GPUs = 8 ranks
      hpcddp status last                   show state and progress
      hpcddp logs last -f                  follow the log

    RUN is the name of a run, a unique prefix of it, a job id, or `last` for the run that was
    submitted last.
    """


def main() -> None:
    """The entry point: print errors as messages, never as a traceback, and exit with their code."""
    try:
        code = _called()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1  # like click, if it notices first
    except (HpcddpError, click.ClickException, click.Abort, KeyboardInterrupt, OSError) as error:
        from hpcddp.cli.terminal import failure

        code = failure.report(error)
    sys.exit(code)


def _called() -> int:
    """Call the command; its exit code."""
    settings: dict[str, Any] = {"prog_name": "hpcddp"}  # also for python -m hpcddp
    if os.environ.get("_HPCDDP_COMPLETE"):
        from hpcddp.cli import completion

        completion.register()
    elif sys.stdout.isatty() and (columns := os.get_terminal_size(1).columns) < NARROW:
        settings["terminal_width"] = columns - 1
    try:
        return cli.main(standalone_mode=False, **settings) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
