"""Step 8 of a job that is a program: a rank's process becomes it, with the rank in its environment.

The program's signals, exit code and output are its own from then on. Each rank waits for the
imports of this module before it begins with its own: they are few.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from hpcddp import JOB_FORMAT
from hpcddp.attempt import exit_codes, launch_facts
from hpcddp.errors import HpcddpError
from hpcddp.preempt import Preemption
from hpcddp.topology import Rank, check_map

READS = 60  # looks at a job.json that cannot be read, a second apart
NOT_FOUND = 127  # as a shell has it
PRIME = 2**127 - 1


def job_of(run_dir: str) -> dict[str, Any]:
    """job.json of a run that has a command; nothing of another, or of one that is damaged or gone.
    One that cannot be read now is read again for a minute.

    Raises:
        OSError: that was not enough.
    """
    for left in reversed(range(READS)):
        try:
            with open(f"{run_dir}/job.json", encoding="utf-8") as file:
                job: dict[str, Any] = json.load(file)
            return job if job["format"] == JOB_FORMAT and job["spec"]["command"] else {}
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return {}
        except OSError:
            if not left:
                raise
            time.sleep(1.0)
    return {}


def become(
    job: Mapping[str, Any], run_dir: str, environ: Mapping[str, str], preemption: Preemption
) -> int:
    """Run the job's command in this process; returns only where that cannot be: an exit code.

    A process that was forked for this rank runs a script as it is; any other becomes the program.

    Raises:
        SystemExit: a script in a forked process has ended.
    """
    attempt = int(environ.get("HPCDDP_ATTEMPT", "1"))
    try:
        rank = Rank.from_env(environ)
        least, most = job["nodes"]
        check_map(rank, (least, most), job["gpus_per_node"])
    except HpcddpError as error:
        print(error, file=sys.stderr, flush=True)
        return exit_codes.FAILED
    again = job["spec"].get("resume_command") if attempt > 1 else None
    words = again or job["spec"]["command"]
    variables = {**trackers(job["run"]), **environ, **rank.to_env()}
    if rank.world_rank == 0:
        look_at_versions(run_dir, attempt, words[0], variables)
    variables |= {"TORCHELASTIC_RUN_ID": job["run"], "HPCDDP_RUN_DIR": run_dir}
    if job["spec"].get("data", {}).get("stage"):
        try:
            variables["HPCDDP_STAGE"] = staged(job, run_dir, rank, environ, preemption)
        except HpcddpError as error:
            return failed(error, run_dir, attempt, rank)
    variables |= of_launcher(job, rank, environ)
    preemption.restore()  # from here on a signal finds no handler; before, it was as if so
    if preemption.requested:
        return 128 + int(getattr(signal, preemption.signal))
    if environ.get("HPCDDP_FORKED"):
        from hpcddp.launch.script import Script

        os.environ.update(variables)
        return Script(words).run()
    return execute(words, variables)


def of_launcher(
    job: Mapping[str, Any], rank: Rank, environ: Mapping[str, str]
) -> Mapping[str, str]:
    """The variables by which a launcher's own library knows the rank."""
    facts = launch_facts.of(job.get("launcher", ""), job.get("launch", {}))
    module = facts.get("environment")
    return import_module(module).environment(rank, environ) if module else {}


def staged(
    job: Mapping[str, Any],
    run_dir: str,
    rank: Rank,
    environ: Mapping[str, str],
    preemption: Preemption,
) -> str:
    """The folder of what the job stages, when it is there, or when the job is to stop."""
    from hpcddp.data.node_wait import bring
    from hpcddp.rundir import RunDir

    return str(bring(RunDir(run_dir), job, rank, environ, lambda: not preemption.requested))


def failed(error: HpcddpError, run_dir: str, attempt: int, rank: Rank) -> int:
    """Write down what a rank failed of before it became the program, and say it."""
    from hpcddp.attempt.error_record import report
    from hpcddp.attempt.rank_exit import share_failure
    from hpcddp.rundir import RunDir

    folder = RunDir(run_dir).attempt(attempt)
    print(report(error, folder, rank.world_rank, stepped=False), file=sys.stderr, flush=True)
    if error.kind == "mistake":  # the first rank of each node stages for all of them
        share_failure(error, folder, rank.node, rank.world_size // rank.local_size)
    return exit_codes.FAILED


def execute(words: list[str], environ: Mapping[str, str]) -> int:
    """Become a program; returns only where that cannot be: an exit code."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a child would too
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
    return NOT_FOUND


def look_at_versions(run_dir: str, attempt: int, program: str, environ: Mapping[str, str]) -> None:
    """Record what is installed, where submission could not; or say what of it is not as it was."""
    if attempt == 1 and os.access(f"{run_dir}/versions.json", os.F_OK):
        return
    from hpcddp import versions
    from hpcddp.rundir import RunDir, read_json, write_json

    run = RunDir(run_dir)
    with contextlib.suppress(HpcddpError, OSError):
        before = read_json(run.versions)
        now = versions.installed(program, environ)
        if before is None:
            write_json(run.versions, now)
        elif changes := versions.changes(before, now):
            more = f" and {len(changes) - 5} more" if len(changes) > 5 else ""
            text = ", ".join(changes[:5]) + more
            print(f"hpcddp: changed since it was submitted: {text}", flush=True)


def trackers(run: str) -> dict[str, str]:
    """The variables that keep a run one run at its trackers, over all of its attempts."""
    key = f"{int.from_bytes(run.encode(), 'big') % PRIME:032x}"
    return {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow", "COMET_EXPERIMENT_KEY": key}
