"""Step 3: all that a plan must fulfil. `check` calls all checks but `launcher`, in order.

Where a value is checked:

    keys.py            its type and range, when it is read
    sizes.py           numbers of nodes, GPUs and CPUs, amounts of memory
    checks.py          what it means: names, the batch, files, the environment, sbatch options,
                       a cluster's limits, what the site offers
    conflicts.py       a key against the strategy or another key: a table
    code_checks.py     the code that a command's run copies: secrets, size, paths; the last one
    plan.py            whether the template is there
    render.py          whether a script can hold it

notes.py and advice.py refuse nothing: they tell the user what may go wrong.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcddp import strategy
from hpcddp.data import names
from hpcddp.errors import ClusterError, UserError
from hpcddp.launch import launchers
from hpcddp.launch.launchers import Launcher
from hpcddp.planning import conflicts
from hpcddp.planning.asked import Asked
from hpcddp.planning.clusters import Profile
from hpcddp.sizes import NodeRange, bytes_of
from hpcddp.slurm import time_limit
from hpcddp.spec import KEYS, JobSpec

# sbatch options that follow from other keys -> from which; any other option passes through.
OWNED = {
    **dict.fromkeys(("nodes", "N"), "--nodes"),
    **dict.fromkeys(("gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket"), "--gpus"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core",
                     "ntasks-per-socket", "distribution", "m"), "--nodes and --gpus"),
    **dict.fromkeys(("job-name", "J"), "--name"),
    **dict.fromkeys(("open-mode", "chdir", "D"), "the run's folder"),
    **dict.fromkeys(("o", "e"), "output and error"),
    **dict.fromkeys(("array", "a", "wrap", "parsable", "test-only", "wait", "W"), "hpcddp submit"),
}  # fmt: skip
CONTRADICTING = ("SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK", "SBATCH_ARRAY_INX",
                 "SBATCH_DISTRIBUTION", "SBATCH_WAIT")  # fmt: skip
# Names that [env] may not have: those of the ranks, of bash, and of the script's own variables.
RESERVED_ENV = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|UID|EUID|PPID"
    r"|BASHOPTS|SHELLOPTS|BASH_VERSINFO|SLURM_.*|HPCDDP_.*|SUBMITIT_.*"
    r"|RUN|WORKDIR|PYTHON|NODES|GPUS_PER_NODE|CPUS_PER_TASK|MODULES|ENVIRONMENT|COMMAND|TRACKERS)"
)


def check(asked: Asked, environ: Mapping[str, str], folder: Path, *, begun: bool) -> None:
    """Refuse a job that cannot be planned.

    Args:
        environ: the user's environment.
        folder: the current folder, where the job will work.
        begun: the run has saved a checkpoint; files that only a new run reads may be gone.

    Raises:
        UserError: the first mistake.
    """
    job, sources, profile, nodes, gpus, _ = asked
    name(job, sources)
    if job.command:
        command(job, sources, profile, folder)
    else:
        batch(job, nodes, gpus, sources)
        conflicts.check(job, strategy.layout(job.strategy, nodes.max, gpus), sources)
    if job.start_from:
        weights(job, sources, folder, begun=begun)
    data(job, sources)
    environment(job, sources, profile)
    options(job, sources)
    limits(job, nodes, gpus, profile)
    if asked.backend == "slurm":
        variables(environ)


def name(job: JobSpec, sources: Mapping[str, str]) -> None:
    if not re.fullmatch(r"\w[\w.+-]*", job.name) or len(job.name.encode()) > 100:
        raise UserError(
            f"name is {job.name!r}",
            where=sources.get("name", "name"),
            hint="a name has letters, digits, and . _ + - after the first; 100 bytes at most",
        )


def batch(job: JobSpec, nodes: NodeRange, gpus: int, sources: Mapping[str, str]) -> None:
    """For each number of nodes the strategy has a mesh, and the global batch divides over it."""
    for count in range(nodes.min, nodes.max + 1):
        mesh = strategy.layout(job.strategy, count, gpus, _strategy(sources))
        if job.global_batch % (ranks := mesh.data_size):
            low = job.global_batch // ranks * ranks
            near = f"{low} or {low + ranks}" if low else str(ranks)
            over = f"{mesh}: {ranks} data ranks"
            over = f"{count} x {gpus} = {ranks} ranks" if mesh.plain else over
            raise UserError(
                f"global_batch {job.global_batch} does not divide over {over}",
                where=sources.get("global_batch", "default"),
                hint=f"set global_batch to a multiple of {ranks}, such as {near}",
            )


def _strategy(sources: Mapping[str, str]) -> str:
    """Where the strategy was asked for: an error of its mesh does not name the key itself."""
    source = sources.get("strategy", "default")
    return source if "strategy" in source.lower() else f"{source}: strategy"


def weights(job: JobSpec, sources: Mapping[str, str], folder: Path, *, begun: bool) -> None:
    """A new run starts from a file that is there; a run that has begun does not read it again."""
    where, path = sources.get("start_from", "start_from"), folder / job.start_from
    if job.command:
        hint = "let the program read it, and leave start_from out"
        raise UserError("start_from is for a task, and the job has a command", where=where,
                        hint=hint)  # fmt: skip
    if not begun and not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise UserError(f"start_from is {str(path)!r}, which {what}", where=where,
                        hint="name a file of weights, such as hpcddp export writes")  # fmt: skip


def command(job: JobSpec, sources: Mapping[str, str], profile: Profile, folder: Path) -> None:
    """The program and the script that Python runs are there, and no strategy is asked for: a
    command spreads its model itself. Modules or a PATH of the job's own may bring programs that
    this machine cannot see."""
    if job.strategy != KEYS.rows["strategy"].default:
        raise UserError(
            f"strategy is {job.strategy!r}, but a command spreads its model over the ranks itself",
            where=sources.get("strategy", "strategy"),
            hint="leave the strategy out; it is for a job with a task",
        )
    if profile.cluster.modules or "PATH" in job.env:
        return
    for name in ("command", "resume_command"):
        if words := getattr(job, name):
            _program(words, sources.get(name, name), folder)


def data(job: JobSpec, sources: Mapping[str, str]) -> None:
    """The cache has a size, and each staged entry a name of its own on the node's disk."""
    bytes_of(job.data.cache, sources.get("data.cache", "data.cache"), what="a cache", zero=True)
    names.check(job.data.stage, job.dataset, sources)


def launcher(asked: Asked) -> Launcher:
    """The job's launcher: the site has all that it needs, and it can start the command."""
    job, where = asked.spec, asked.sources.get("launcher", "")
    row = launchers.find(job.launcher, asked.backend, where)
    if missing := row.missing(job, asked.profile):
        missing, _, hint = missing.partition("\n")
        raise UserError(
            f"the launcher {row.name} cannot start processes here: {missing}",
            where="launcher",
            hint=hint or f"{launchers.own(asked.backend)} works",
        )
    if row.python:
        _forked(job, row)
    return row


def _forked(job: JobSpec, row: Launcher) -> None:
    """A launcher that runs scripts in its own processes has scripts to run, in this Python."""
    from hpcddp.launch.script import Script

    for words in filter(None, (job.command, job.resume_command)):
        python = Script(words).python
        named, own = Path(shutil.which(python) or python), Path(sys.executable)
        if named.absolute().parent != own.parent:
            raise UserError(
                f"the launcher {row.name} runs scripts in the Python of hpcddp, {own}, and "
                f"the command names {named}",
                where="launcher",
                hint="install hpcddp in that Python too, or take another launcher",
            )


def _program(words: list[str], where: str, folder: Path) -> None:
    program, *rest = words
    if not shutil.which(program if "/" not in program else folder / program):
        is_file = Path(folder, program).is_file()
        start = "make it executable, or start it with its interpreter"
        hint = start if is_file else "is it on PATH?"
        raise UserError(f"there is no program {program!r} here", where=where, hint=hint)
    if Path(program).name == "env":
        while rest and "=" in rest[0]:
            rest.pop(0)
        if rest and not rest[0].startswith("-"):
            _program(rest, where, folder)
        return
    python = re.fullmatch(r"python[\d.]*", Path(program).name)
    while python and rest and re.fullmatch(r"-[bBdEIOPqsSuvx]+", rest[0]):  # flags of Python's
        rest.pop(0)
    script = rest[0] if rest else ""
    if python and script and not script.startswith("-") and not Path(folder, script).exists():
        hint = f"the job works in {folder}"
        raise UserError(f"there is no script {script!r} here", where=where, hint=hint)


def environment(job: JobSpec, sources: Mapping[str, str], profile: Profile) -> None:
    asked = [(name, "env", sources.get(f"env.{name}", "env")) for name in job.env]
    asked += [(name, "variables", str(profile.path)) for name in profile.cluster.variables]
    for name, table, where in asked:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"{table} name {name!r} is no variable name", where=where)
        if RESERVED_ENV.fullmatch(name):
            what = f"{table} name {name} belongs to the launcher, the shell or the script"
            raise UserError(what, where=where, hint="take another name")


def variables(environ: Mapping[str, str]) -> None:
    """No SBATCH_* variable contradicts the map: for sbatch they come before the script."""
    for name in CONTRADICTING:
        if name in environ:
            raise UserError("contradicts the map", where=name, hint=f"unset {name}")


def options(job: JobSpec, sources: Mapping[str, str]) -> None:
    """No sbatch option contradicts the map, and each value is one that sbatch reads as meant."""
    for name, value in job.slurm.items():
        where = sources.get(f"slurm.{name}", "slurm")
        gpu_gres = name in ("gres", "tres-per-node") and "gpu" in str(value)
        if name in OWNED or gpu_gres:
            owner = "--gpus (a profile's gpu_option says how)" if gpu_gres else OWNED[name]
            raise UserError(f"{name}={value} contradicts the map", where=where,
                            hint=f"{name} follows from {owner}")  # fmt: skip
        if not re.fullmatch(r"[a-z][a-z-]+", name):
            raise UserError(f"{name!r} is not the long name of an sbatch option", where=where)
        if value == "":
            raise UserError(f"{name} is empty", where=where)
        if name == "signal" and not re.fullmatch(
            r"(?:SIG)?(USR1|USR2|TERM|HUP|INT)(@\d+)?", str(value)
        ):
            raise UserError(
                f"signal is {value!r}", where=where,
                hint="write a signal that the ranks can take, such as USR1@60; "
                "with B: they would get none",
            )  # fmt: skip
        if name in ("requeue", "no-requeue") and not isinstance(value, bool):
            raise UserError(f"{name} is {value!r}, but must be true or false", where=where)
    if "time" in job.slurm:
        time_limit.seconds(str(job.slurm["time"]), sources["slurm.time"])


def limits(job: JobSpec, nodes: NodeRange, gpus: int, profile: Profile) -> None:
    cluster = profile.cluster
    for asked, limit, what in (
        (nodes.max, cluster.nodes, "nodes"),
        (gpus, cluster.gpus_per_node, "GPUs per node"),
    ):
        if limit and asked > limit:
            raise ClusterError(f"{asked} {what} asked for, but {profile.name} has {limit}",
                               where=str(profile.path))  # fmt: skip
    if cluster.max_time and "time" in job.slurm:
        time, most = str(job.slurm["time"]), cluster.max_time
        if time_limit.seconds(time, "time") > time_limit.seconds(most, str(profile.path)):
            what = f"time {time} asked for, but {profile.name} allows {most}"
            raise ClusterError(what, where=str(profile.path))
