"""Step 8 of a job with a command: a rank's process runs it, with the rank in its environment.

The process is replaced by the program (exec), so signals, exit code and output are the program's
own. Each rank waits for the imports of this module before the program starts: they are few.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from hpcddp import JOB_FORMAT, gloo
from hpcddp.attempt import exit_codes, launch_facts
from hpcddp.errors import HpcddpError, UserError
from hpcddp.preempt import Preemption
from hpcddp.topology import Rank, check_map

if TYPE_CHECKING:
    from hpcddp.launch.script import Script

READS = 60  # tries to read job.json, a second apart
FILE = "hpcddp.py"  # hides the package from a script beside it
NO_HOOK = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # keeps torch from calling hpcddp.gloo
PRIME = 2**127 - 1


def job_of(run_dir: str) -> dict[str, Any]:
    """job.json of a run with a command; empty for a run with a task, and for a file that is damaged
    or missing. A file that cannot be read now is tried again for a minute.

    Raises:
        OSError: it still cannot be read.
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
    """Run the job's command in this process; returns an exit code only if it cannot start. A
    process of the launcher `fork` runs the script itself; any other is replaced by the program.

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
    words = in_own_python(again or job["spec"]["command"], job["spec"].get("software", {}))
    variables = {**trackers(job["run"]), **environ, **rank.to_env()}
    if rank.world_rank == 0:
        look_at_versions(run_dir, attempt, words[0], variables)
    variables |= {"TORCHELASTIC_RUN_ID": job["run"], "HPCDDP_RUN_DIR": run_dir}
    try:
        variables |= staged(job, run_dir, rank, environ, preemption)
    except HpcddpError as error:
        return failed(error, run_dir, attempt, rank)
    variables |= {**of_launcher(job, rank, environ), **beside_hpcddp(words, rank)}
    preemption.restore()  # from here on a stop signal ends the process
    if preemption.requested:
        return 128 + int(getattr(signal, preemption.signal))
    if here := in_this_process(words, variables):
        os.environ.update(variables)
        return here.run()
    try:
        execute(words, variables)
    except OSError as error:
        return failed(not_started(words, error), run_dir, attempt, rank)


def in_this_process(words: list[str], variables: dict[str, str]) -> Script | None:
    """The script that a forked process runs itself, if the command is one."""
    if not variables.pop("HPCDDP_FORKED", ""):
        return None
    from hpcddp.launch import script  # needed by no other process

    return script.in_process(words)


def in_own_python(words: list[str], software: Mapping[str, Any]) -> list[str]:
    """A command whose `python` is that of the job's own environment, which runs this process too:
    an image may have it under another name, or not on PATH."""
    own = [software.get(name) for name in ("conda", "venv", "uv")]
    own.append(software.get("container", {}).get("image"))
    if words[0] in ("python", "python3") and any(own):
        return [sys.executable, *words[1:]]
    return words


def of_launcher(
    job: Mapping[str, Any], rank: Rank, environ: Mapping[str, str]
) -> Mapping[str, str]:
    """The variables by which a launcher's own library knows the rank, and by which another launcher
    that starts in it is noticed: not where the ranks' rendezvous cannot be seen."""
    facts = launch_facts.of(job.get("launcher", ""), job.get("launch", {}))
    seen = {} if facts.get("hides") else {gloo.WORLD: gloo.world(rank, environ)}
    module = facts.get("environment")
    return seen | (import_module(module).environment(rank, environ) if module else {})


def beside_hpcddp(words: list[str], rank: Rank) -> Mapping[str, str]:
    """The variables of a script beside a file named as the package: it cannot import that, so
    torch must not try to. Rank 0 says so."""
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    for folder in {script[: script.rfind("/") + 1], ""}:
        if os.access(path := f"{folder}{FILE}", os.F_OK):
            if rank.world_rank == 0:
                print(f"hpcddp: {path} hides the package hpcddp from this command: rename the file "
                      f"if the script imports the package", flush=True)  # fmt: skip
            return NO_HOOK
    return {}


def staged(
    job: Mapping[str, Any],
    run_dir: str,
    rank: Rank,
    environ: Mapping[str, str],
    preemption: Preemption,
) -> Mapping[str, str]:
    """The variable with the folder of staged data, once that is complete or the job is to stop."""
    if not job["spec"].get("data", {}).get("stage"):
        return {}
    from hpcddp.data.node_wait import bring
    from hpcddp.rundir import RunDir

    folder = bring(RunDir(run_dir), job, rank, environ, lambda: not preemption.requested)
    return {"HPCDDP_STAGE": str(folder)}


def failed(error: HpcddpError, run_dir: str, attempt: int, rank: Rank) -> int:
    """Record and print why a rank failed before its program started."""
    from hpcddp.attempt.error_record import report
    from hpcddp.attempt.rank_exit import share_failure
    from hpcddp.rundir import RunDir

    folder = RunDir(run_dir).attempt(attempt)
    print(report(error, folder, rank.world_rank, stepped=False), file=sys.stderr, flush=True)
    if error.kind == "mistake":  # the first rank of each node stages for all of them
        share_failure(error, folder, rank.node, rank.world_size // rank.local_size)
    return exit_codes.FAILED


def execute(words: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program.

    Raises:
        OSError: it cannot be started.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a child would too
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(words[0], words, environ)


def not_started(words: list[str], error: OSError) -> UserError:
    """The error of a program that cannot be started, and the remedy."""
    import shlex

    program, is_file = words[0], os.access(words[0], os.F_OK)
    hint = "is it installed on the nodes, and on their PATH?"
    if is_file and error.errno == errno.EACCES:
        hint = f"run `chmod +x {shlex.quote(program)}`"
    elif is_file and error.errno == errno.ENOEXEC:
        hint = "its first line must name its interpreter, such as #!/usr/bin/env python3"
    elif is_file:
        hint = "is the interpreter in its first line installed on the nodes?"
    elif "/" in program:
        hint = "is the file there on every node?"
    if is_file and program.endswith(".py"):
        hint += f"; or: -- python {shlex.join(words)}"
    return UserError(f"cannot start {program}: {error.strerror}", where="command", hint=hint)


def look_at_versions(run_dir: str, attempt: int, program: str, environ: Mapping[str, str]) -> None:
    """Record the installed packages if submission could not; else print which have changed."""
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
            print(f"hpcddp: changed since submission: {text}", flush=True)


def trackers(run: str) -> dict[str, str]:
    """The variables that make all attempts one run at W&B and Comet."""
    key = f"{int.from_bytes(run.encode(), 'big') % PRIME:032x}"
    return {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow", "COMET_EXPERIMENT_KEY": key}
