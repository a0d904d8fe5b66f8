"""Step 3: the checks of a plan. `check` calls all of them, in order.

Where a value is checked:

    keys.py            type and range, when it is read
    sizes.py           numbers of nodes, GPUs and CPUs, memory sizes
    asked.py           options without Slurm; inner_launcher.py: a launcher in a command
    checks.py          meaning: names, the batch, files, the environment, sbatch options, the
                       limits of a cluster, the programs of the site
    conflicts.py       a key against the strategy or another key: a table
    code_checks.py     the code snapshot of a command: secrets, size, paths; checked last; in
                       project/
    plan.py            whether the template exists
    render.py          whether a script can contain the value

notes.py and advice.py refuse nothing: they warn the user.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpcddp import strategy
from hpcddp.data import names
from hpcddp.errors import ClusterError, UserError
from hpcddp.keys import toml_text
from hpcddp.planning import conflicts
from hpcddp.planning.asked import Asked
from hpcddp.planning.clusters import Profile
from hpcddp.sizes import NodeRange, bytes_of, counted
from hpcddp.slurm import time_limit
from hpcddp.spec import KEYS, JobSpec

# sbatch options that hpcddp sets -> from what; it passes on any other option.
OWNED = {
    **dict.fromkeys(("nodes", "N"), "--nodes"),
    **dict.fromkeys(("gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket"), "--gpus"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core",
                     "ntasks-per-socket", "distribution", "m"), "--nodes and --gpus"),
    **dict.fromkeys(("job-name", "J"), "--name"),
    **dict.fromkeys(("open-mode", "chdir", "D"), "the run folder"),
    **dict.fromkeys(("o", "e"), "--sbatch output=FILE and error=FILE"),
    **dict.fromkeys(("array", "a"), "`sbatch --array`, on a script of `hpcddp render`"),
    **dict.fromkeys(("wrap", "parsable", "test-only", "wait", "W"), "hpcddp"),
}  # fmt: skip
CONFLICTING = ("SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK", "SBATCH_ARRAY_INX",
                 "SBATCH_DISTRIBUTION", "SBATCH_WAIT")  # fmt: skip
# Names that are not allowed in [env]: those of the ranks, of bash, and of the script's variables.
RESERVED_ENV = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|UID|EUID|PPID"
    r"|BASHOPTS|SHELLOPTS|BASH_VERSINFO|SLURM_.*|HPCDDP_.*|SUBMITIT_.*"
    r"|RUN|WORKDIR|PYTHON|NODES|GPUS_PER_NODE|CPUS_PER_TASK|MODULES|SETUP|CONDA|VENV|IMAGE|RUNTIME|BINDS|CONTAINER|SRUN_OPTIONS|ENVIRONMENT|COMMAND|TRACKERS)"
)


def check(asked: Asked, environ: Mapping[str, str], folder: Path, *, begun: bool) -> None:
    """Refuse an invalid job.

    Args:
        environ: the user's environment.
        folder: the current folder, where the job will work.
        begun: the run has saved a checkpoint; files that only a new run reads may be missing.

    Raises:
        UserError: the first error.
    """
    job, sources, profile, nodes, gpus = asked[:5]
    name(job, sources)
    if job.command:
        command(job, sources, folder)
    else:
        batch(job, nodes, gpus, sources)
        conflicts.check(job, strategy.layout(job.strategy, nodes.max, gpus), sources)
    if job.start_from:
        weights(job, sources, folder, begun=begun)
    data(job, sources)
    environment(job, sources, profile)
    options(job, sources, gpus=profile.cluster.gpu_option != "none" and job.device != "cpu")
    limits(job, asked.allocated, gpus, profile)
    if asked.backend == "slurm":
        variables(environ)


def name(job: JobSpec, sources: Mapping[str, str]) -> None:
    if not re.fullmatch(r"\w[\w.+-]*", job.name) or len(job.name.encode()) > 100:
        raise UserError(
            f"invalid name {job.name!r}",
            where=sources.get("name", "name"),
            hint="use a letter or digit, then letters, digits and . _ + -, at most 100 bytes",
        )


def batch(job: JobSpec, nodes: NodeRange, gpus: int, sources: Mapping[str, str]) -> None:
    """The strategy has a mesh for each number of nodes, and the global batch divides over it."""
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
    """The source of the strategy with the key's name, which an error of its mesh does not have."""
    source = sources.get("strategy", "default")
    return source if "strategy" in source.lower() else f"{source}: strategy"


def weights(job: JobSpec, sources: Mapping[str, str], folder: Path, *, begun: bool) -> None:
    """The weights of a new run exist; a run with a checkpoint does not read them again."""
    where, path = sources.get("start_from", "start_from"), folder / job.start_from
    if job.command:
        hint = "remove start_from, and read the weights in the program"
        raise UserError("start_from requires a task, but the job has a command", where=where,
                        hint=hint)  # fmt: skip
    if not begun and not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"start_from is {str(path)!r}, which {what}", where=where,
                        hint="use a file of weights, as `hpcddp export` writes it")  # fmt: skip


def command(job: JobSpec, sources: Mapping[str, str], folder: Path) -> None:
    """The program and its Python script exist, and the job sets no strategy: a command distributes
    its model itself. A job with software or a PATH of its own may have programs that this machine
    does not have."""
    if job.strategy != KEYS.rows["strategy"].default:
        raise UserError(
            f"strategy is {job.strategy!r}, but a command distributes its model itself",
            where=sources.get("strategy", "strategy"),
            hint="remove the strategy; it requires a job with a task",
        )
    if job.own_programs:
        return
    for name in ("command", "resume_command"):
        if words := getattr(job, name):
            _program(words, sources.get(name, name), folder)


def data(job: JobSpec, sources: Mapping[str, str]) -> None:
    """The cache size is valid, and staged entries have different names on the node's disk."""
    bytes_of(job.data.cache, sources.get("data.cache", "data.cache"), what="cache", zero=True)
    names.check(job.data.stage, job.dataset, sources)


def _program(words: list[str], where: str, folder: Path) -> None:
    program, *rest = words
    if not shutil.which(program if "/" not in program else folder / program):
        if "/" in program and Path(folder, program).is_file():
            raise _not_executable(words, where)
        hint = "check the path" if "/" in program else "install it, or write its path"
        raise UserError(f"program {program!r} not found", where=where, hint=hint)
    if Path(program).name == "env":
        while rest and "=" in rest[0]:
            rest.pop(0)
        if rest and not rest[0].startswith("-"):
            _program(rest, where, folder)
        return
    python = re.fullmatch(r"python[\d.]*", Path(program).name)
    while python and rest and re.fullmatch(r"-[bBdEIOPqsSuvx]+", rest[0]):  # Python's own options
        rest.pop(0)
    script = rest[0] if rest else ""
    if python and script and not script.startswith("-") and not Path(folder, script).exists():
        hint = f"check the path, which starts at {folder}"
        raise UserError(f"script {script!r} not found", where=where, hint=hint)


def _not_executable(words: list[str], where: str) -> UserError:
    """The error of a script that has no permission to run."""
    program, text = words[0], shlex.join(words)
    starters = {".py": "python", ".sh": "bash"}
    start = starters.get(Path(program).suffix)
    other = f", or start it with `{start} {text}`" if start else ""
    return UserError(f"{program!r} is not executable", where=where,
                     hint=f"run `chmod +x {shlex.quote(program)}`{other}")  # fmt: skip


def environment(job: JobSpec, sources: Mapping[str, str], profile: Profile) -> None:
    asked = [(name, "env", sources.get(f"env.{name}", "env")) for name in job.env]
    asked += [(name, "variables", str(profile.path)) for name in profile.cluster.variables]
    for name, table, where in asked:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            hint = "use letters, digits and _, and no digit first"
            raise UserError(f"invalid variable name {name!r} in {table}", where=where, hint=hint)
        if RESERVED_ENV.fullmatch(name):
            what = f"{table} sets {name}, which the launcher, the shell or the script sets"
            raise UserError(what, where=where, hint="use another name")


def variables(environ: Mapping[str, str]) -> None:
    """No SBATCH_* variable conflicts with the job: sbatch prefers them to the script."""
    for name in CONFLICTING:
        if name in environ:
            what = "conflicts with the options of hpcddp"
            raise UserError(what, where=name, hint=f"unset {name}")


def options(job: JobSpec, sources: Mapping[str, str], *, gpus: bool) -> None:
    """No sbatch option conflicts with those that hpcddp sets, and each value is valid.

    Args:
        gpus: hpcddp requests GPUs.
    """
    for name, value in job.slurm.items():
        where = sources.get(f"slurm.{name}", "slurm")
        _set_by_hpcddp(name, value, where, gpus=gpus)
        if not re.fullmatch(r"[a-z][a-z-]+", name):
            hint = "use the long name without dashes, such as constraint"
            raise UserError(f"{name!r} is not the long name of an sbatch option", where=where,
                            hint=hint)  # fmt: skip
        if value == "":
            raise UserError(f"{name} is empty", where=where, hint=f"set a value or remove {name}")
        if name == "signal" and not re.fullmatch(
            r"(?:SIG)?(USR1|USR2|TERM|HUP|INT)(@\d+)?", str(value)
        ):
            hint = "use a signal for the ranks, such as USR1@60, without B:"
            raise UserError(f"invalid signal {value!r}", where=where, hint=hint)
        if name in ("requeue", "no-requeue") and not isinstance(value, bool):
            what = f"{name} is {toml_text(value)}, but must be true or false"
            raise UserError(what, where=where)
    if "time" in job.slurm:
        time_limit.seconds(str(job.slurm["time"]), sources["slurm.time"])


def _set_by_hpcddp(name: str, value: object, where: str, *, gpus: bool) -> None:
    """Refuse an sbatch option that hpcddp sets, or that excludes one of those."""
    text, hint = f"{name}={toml_text(value) if isinstance(value, bool) else value}", ""
    if gpus and name in ("gres", "tres-per-node") and "gpu" in str(value):
        hint = "use --gpus; gpu_option in a cluster profile says how GPUs are requested"
    elif name == "cpus-per-gpu":
        what = f"{text} conflicts with cpus-per-task, which hpcddp sets"
        hint = (
            f"use --sbatch cpus-per-task={value}, the CPUs of a rank, or cpus_per_gpu in a profile"
        )
        raise UserError(what, where=where, hint=hint)
    elif name in OWNED:
        hint = f"{name} is set by {OWNED[name]}; remove it"
    if hint:
        raise UserError(f"{text} conflicts with the options of hpcddp", where=where, hint=hint)


def limits(job: JobSpec, nodes: NodeRange, gpus: int, profile: Profile) -> None:
    """What is asked for is within the limits of the profile.

    Args:
        nodes: with the spares.
    """
    cluster = profile.cluster
    spares = " with spares" if job.spares else ""
    for asked, limit, text, option in (
        (nodes.max, cluster.nodes, counted(nodes.max, "node") + spares, "--nodes"),
        (gpus, cluster.gpus_per_node, f"{counted(gpus, 'GPU')} per node", "--gpus"),
    ):
        if limit and asked > limit:
            text = f"{text} requested, but {profile.name} has {limit}"
            hint = f"use {option} {limit} or fewer"
            if job.spares and option == "--nodes":
                hint += ", of them --spares"
            raise ClusterError(text, where=str(profile.path), hint=hint)
    if cluster.max_time and "time" in job.slurm:
        time, most = str(job.slurm["time"]), cluster.max_time
        if time_limit.seconds(time, "time") > time_limit.seconds(most, str(profile.path)):
            what = f"time limit {time} requested, but {profile.name} allows {most}"
            hint = f"use --time {most} or less"
            raise ClusterError(what, where=str(profile.path), hint=hint)
