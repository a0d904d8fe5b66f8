"""The command line: one small module per group of commands, imported when its command is called.

It imports all rooms below, and ``train`` in one module alone (``weights``).

Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 the job or the tool failed, 2 usage or
job file, 3 Slurm out of reach, 4 partly done, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

from hpcddp import __version__
from hpcddp.errors import HpcddpError

# Command -> the module that holds it, and the line that --help shows.
COMMANDS = {
    "submit": ("submit", "Submit a training job, or train here where there is no Slurm."),
    "run": ("run", "Train in this one process, for a debugger."),
    "render": ("show", "Print the script that sbatch takes."),
    "plan": ("plan", "Estimate what each strategy takes of a GPU, and say which to take."),
    "ranks": ("ranks", "Print the map of nodes, GPUs and ranks."),
    "config": ("show", "Print each value of a job and where it comes from."),
    "ls": ("runs", "List the runs."),
    "status": ("runs", "Tell how a run is, and why it waits."),
    "watch": ("watch", "Show a run live, on one page of the terminal."),
    "why": ("why", "Tell why each attempt of a run ended, and what it cost."),
    "report": ("report", "Write what happened in runs to one HTML file."),
    "logs": ("logs", "Print what the ranks wrote."),
    "dashboard": ("dashboard", "Show all runs in a browser, live."),
    "track": ("track", "Tell TensorBoard, MLflow or Weights & Biases of a run."),
    "stop": ("control", "Save a checkpoint, then end the run."),
    "preempt": ("control", "Save a checkpoint, leave, and come back: what a preemption does."),
    "cancel": ("control", "End a run now."),
    "resume": ("control", "Go on with a run that has ended."),
    "export": ("weights", "Write the weights as one plain file."),
    "import": ("weights", "Submit a job that starts from the weights of a file."),
    "strategies": ("strategies", "Compare how a job's model can be spread, in one table."),
    "rehearse": ("rehearse", "Play preemptions, crashes and other faults on a job beforehand."),
    "sandbox": ("sandbox", "A whole real Slurm on this machine."),
}


class LazyCommand(click.Command):
    """Stands in the group's table for a command that is imported when it is called.

    It is an ordinary entry, so that help, completion and "did you mean" see it.
    """

    def __init__(self, name: str, module: str, text: str) -> None:
        super().__init__(name, help=text, short_help=text, add_help_option=False)
        self.module = module

    def load(self) -> click.Command:
        """The command itself."""
        name = self.name or ""
        attribute = f"{name}_" if iskeyword(name) else name
        command: click.Command = getattr(import_module(f"hpcddp.cli.{self.module}"), attribute)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return self.load().make_context(*args, **kwargs)


@click.group(
    commands={n: LazyCommand(n, module, text) for n, (module, text) in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="hpcddp")
def cli() -> None:
    """Distributed PyTorch training on Slurm, and the same command on this machine.

    \b
      hpcddp submit --nodes 2 --gpus 4     train on 2 nodes x 4 GPUs = 8 ranks
      hpcddp status last                   how is it?
      hpcddp logs last -f                  follow it

    RUN is a run's name, a unique prefix of it, a job id, or `last`.
    """


def main() -> None:
    """The entry point: errors become words and exit codes, never a traceback."""
    try:
        code = cli.main(standalone_mode=False) or 0
        sys.stdout.flush()
        sys.exit(code)
    except HpcddpError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)  # as click does when it meets the closed pipe first
    except OSError as error:  # a full disk, a folder that was taken away
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
