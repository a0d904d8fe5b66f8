"""Steps 7 and 8: one rank, from its environment to its exit code.

A script starts ``python -P -m hpcddp.worker RUN_DIR``. submitit pickles ``Worker(run_dir)``, and
``submitit.core._submit`` calls it. Both end the process with one of the codes in exit_codes.py.
``run`` is the function underneath, for a debugger.

A signal may come at any time. Until all ranks have reached the rendezvous, a stop signal ends this
rank at once: there is nothing to save yet, and the vote that stops all ranks together may never
come if another rank is gone. From then on a signal sets a flag for the next vote.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from hpcddp.attempt import exit_codes
from hpcddp.attempt.rank_exit import end, end_children, hung, share_failure
from hpcddp.preempt import Preemption, end_on_stop_signals
from hpcddp.processes import die_with_parent, with_room
from hpcddp.stacks.answer import answer

if TYPE_CHECKING:
    from hpcddp.rundir import RunDir
    from hpcddp.topology import Rank

# Set if a launcher's own process has started the rank: torch's agent, or a Dask worker.
PARENTS = {"TORCHELASTIC_USE_AGENT_STORE", "HPCDDP_DASK"}


class Worker:
    """A callable that runs one rank of a run; plain data, pickled by reference."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = os.fspath(run_dir)

    def __call__(self) -> NoReturn:
        end_on_stop_signals()
        if os.environ.keys() & PARENTS:
            die_with_parent()
        # An array's element has a run folder of its own, which its script names.
        folder = os.environ.get("HPCDDP_RUN_DIR") or self.run_dir
        answer(os.environ)  # a program that replaces this process answers once it imports torch
        watch_node(folder)
        end(with_room(lambda: _start(folder, os.environ, Preemption())))


def run(
    run: RunDir,
    rank: Rank,
    attempt: int,
    *,
    max_steps: int | None = None,
    on_record: Callable[[dict[str, Any]], None] | None = None,
) -> str:
    """Train as one rank in this process; exceptions are raised and signals keep their meaning.

    Args:
        max_steps: most optimizer steps, in place of the job's.
        on_record: called with every metrics record of rank 0.

    Returns: "done" or "stopped".
    """
    from hpcddp.train.job import train  # imports torch
    from hpcddp.train.rank.world import leave

    outcome = train(run, rank, attempt, Preemption(), max_steps, on_record)
    leave()
    return outcome


def watch_node(folder: str) -> None:
    """On the second and the third node of a Slurm job, start a process that acts if the first node
    is lost. A parent of ranks has started one before it forked them."""
    others = os.environ.get("SLURM_NODEID") in ("1", "2") and "HPCDDP_FORKED" not in os.environ
    if others and "SLURM_JOB_ID" in os.environ:
        from hpcddp.attempt import sentry

        sentry.watch_node(folder, os.environ)


def _start(run_dir: str, environ: Mapping[str, str], preemption: Preemption) -> int:
    """Run a task in this process, or replace the process by a command."""
    from hpcddp.launch.command import become, job_of

    if job := job_of(run_dir):
        preemption.install()  # it may stage data first
        return become(job, run_dir, environ, preemption)
    return _live(run_dir, environ, preemption)


def _live(run_dir: str, environ: Mapping[str, str], preemption: Preemption) -> int:
    """Run a rank of a task; its exit code. The first rank that fails records its failure."""
    from hpcddp.attempt import lost_script
    from hpcddp.attempt.decision import CAUSES, CRASH, OF_KIND
    from hpcddp.attempt.error_record import kind_of, report
    from hpcddp.errors import LeaseLost
    from hpcddp.launch.imports import preload
    from hpcddp.rundir import RunDir
    from hpcddp.topology import Rank
    from hpcddp.train.monitor.heartbeat import Heartbeat

    folder, rank, attempt = RunDir(run_dir), None, int(environ.get("HPCDDP_ATTEMPT", "1"))
    heartbeat = Heartbeat()
    try:
        rank = Rank.from_env(environ)
        if "HPCDDP_FORKED" not in environ:  # else its parent has
            preload(task=True)
        from hpcddp.train.job import train  # imports torch

        outcome = train(
            folder, rank, attempt, preemption,
            met=preemption.install, heartbeat=heartbeat, on_hang=hung,
        )  # fmt: skip
    except LeaseLost as error:  # a superseded attempt writes nothing more
        print(error, file=sys.stderr)
        return exit_codes.FENCED
    except BaseException as error:
        end_children()  # before Python clears the error's frames, which waits for them
        stepped, number = heartbeat.taken > 0, rank.world_rank if rank else None
        text = report(error, folder.attempt(attempt), number, stepped=stepped)
        print(text, file=sys.stderr, flush=True)
        if rank and kind_of(error, stepped=stepped) == "mistake":
            share_failure(error, folder.attempt(attempt), rank.world_rank, rank.world_size)
        cause = OF_KIND.get(kind_of(error, stepped=stepped), CRASH)
        return CAUSES[cause].code or exit_codes.FAILED
    if outcome == "done":
        return exit_codes.DONE
    if rank.world_rank == 0:
        lost_script.relieve(folder, attempt)
    return exit_codes.STOPPED


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -P -m hpcddp.worker RUN_DIR")
    Worker(sys.argv[1])()
