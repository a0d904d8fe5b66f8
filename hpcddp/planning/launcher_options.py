"""Launchers that a command may begin with, and their options: tables for inner_launcher.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

# The meaning of an option. A meaning that begins with -- is the option of hpcddp in its place.
NODES = "nodes"
GPUS = "ranks of a node"
RANKS = "ranks of all nodes"
ONE_NODE = "all ranks on one node"
SEVERAL = "more than one rank"
MODULE = "the script is a module"
PROGRAM = "the script is a program, without Python"
ENV = "an environment variable"
NOTHING = "no effect under hpcddp"
SET = "set by hpcddp"  # the rendezvous, the nodes, labels of the output


class ForeignLauncher(NamedTuple):
    """One launcher.

    Args:
        name: as a user writes it.
        options: key, without dashes and with - for _ -> meaning.
        flags: keys of options without a value; all others have one.
        values: keys of options with several values -> their number.
        python: whether its script runs in Python.
        becomes_script: whether its script can take its place.
        needs: an option without which it does more than to start ranks.
        more: backend -> options of hpcddp that belong to the corrected command.
        note: the end of the note where the script takes its place.
    """

    name: str
    options: Mapping[str, str]
    flags: Collection[str] = ()
    values: Mapping[str, int] = {}
    python: bool = False
    becomes_script: bool = False
    needs: str = ""
    more: Mapping[str, Sequence[str]] = {}
    note: str = ""


class Wrapper(NamedTuple):
    """A program that only starts another one.

    Args:
        valued: its options with a value of their own word.
        arguments: words before the other program.
        verb: its command that starts a program.
        variables: whether NAME=VALUE words may come before the program.
        module: whether -m starts a module of Python, as python's own option does.
    """

    valued: Collection[str] = ()
    arguments: int = 0
    verb: str = ""
    variables: bool = False
    module: bool = False


_CONTAINER = Wrapper(
    ("-B", "--bind", "--env", "--pwd", "-H", "--home", "-W", "--workdir"), 1, "exec"
)
_CONDA = Wrapper(("-n", "--name", "-p", "--prefix", "--cwd"), verb="run")
_RUN = Wrapper(verb="run")
WRAPPERS = {
    "env": Wrapper(("-u", "--unset", "-C", "--chdir"), variables=True),
    "nice": Wrapper(("-n", "--adjustment")),
    "ionice": Wrapper(("-c", "--class", "-n", "--classdata")),
    "timeout": Wrapper(("-k", "--kill-after", "-s", "--signal"), 1),
    "taskset": Wrapper(arguments=1),
    "numactl": Wrapper(("-N", "-C", "-m", "-i", "-p")),
    "stdbuf": Wrapper(("-i", "-o", "-e")),
    "nohup": Wrapper(),
    "setsid": Wrapper(),
    "time": Wrapper(("-f", "-o")),
    "uv": Wrapper(
        ("--with", "-p", "--python", "--extra", "--group", "--project", "--directory", "--env-file",
         "--package"), verb="run", module=True,
    ),
    "apptainer": _CONTAINER, "singularity": _CONTAINER,
    "conda": _CONDA, "mamba": _CONDA, "micromamba": _CONDA,
    "poetry": _RUN, "pipenv": _RUN, "pdm": _RUN, "hatch": _RUN, "pixi": _RUN,
}  # fmt: skip

_SCRIPT = {"m": MODULE, "module": MODULE, "no-python": PROGRAM}
_RENDEZVOUS = dict.fromkeys(
    ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank", "master-addr",
     "master-port", "local-addr", "machine-rank", "main-process-ip", "main-process-port",
     "hostfile", "same-network"), SET,
)  # fmt: skip
_TORCH = {
    "nnodes": NODES, "nproc-per-node": GPUS, "standalone": ONE_NODE, "use-env": NOTHING,
    **_SCRIPT, **_RENDEZVOUS,
}  # fmt: skip
_TORCH_FLAGS = (
    "standalone", "m", "module", "no-python", "run-path", "virtual-local-rank", "use-env",
)  # fmt: skip
_TORCHRUN = ForeignLauncher("torchrun", _TORCH, _TORCH_FLAGS, python=True, becomes_script=True)
_ACCELERATE = ForeignLauncher(
    "accelerate launch",
    {
        "num-machines": NODES, "num-processes": RANKS, "multi-gpu": SEVERAL,
        **_SCRIPT, **_RENDEZVOUS,
        "mixed-precision": "--env ACCELERATE_MIXED_PRECISION={}",
        "num-cpu-threads-per-process": "--env OMP_NUM_THREADS={}",
        "gradient-accumulation-steps": "--env ACCELERATE_GRADIENT_ACCUMULATION_STEPS={}",
        "cpu": "--env ACCELERATE_USE_CPU=true",
    },
    ("m", "module", "no-python", "cpu", "multi-gpu", "tpu", "quiet", "q", "debug", "same-network",
     "use-deepspeed", "use-fsdp", "use-megatron-lm", "use-parallelism-config",
     "enable-cpu-affinity", "dynamo-use-fullgraph", "dynamo-use-dynamic",
     "dynamo-use-regional-compilation", "downcast-bf16", "tpu-cluster", "no-tpu-cluster",
     "tpu-use-sudo", "fp8-use-autocast-during-eval"),
    python=True, becomes_script=True,
    note="; accelerate's configuration file is not read",
)  # fmt: skip
_SBATCH = {
    name: f"--sbatch {name}={{}}"
    for name in ("cpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu", "constraint", "exclude",
                 "nodelist", "reservation", "mail-type", "mail-user", "licenses", "nice")
}  # fmt: skip
_SRUN = ForeignLauncher(
    "srun",
    {
        "N": NODES, "nodes": NODES, "n": RANKS, "ntasks": RANKS, "G": RANKS, "gpus": RANKS,
        "ntasks-per-node": GPUS, "gpus-per-node": GPUS, "gres": GPUS,
        "p": "--partition {}", "partition": "--partition {}",
        "A": "--account {}", "account": "--account {}",
        "t": "--time {}", "time": "--time {}", "q": "--qos {}", "qos": "--qos {}",
        "J": "--name {}", "job-name": "--name {}",
        **_SBATCH, "c": _SBATCH["cpus-per-task"], "C": _SBATCH["constraint"],
        "w": _SBATCH["nodelist"], "x": _SBATCH["exclude"],
        **dict.fromkeys(("l", "label", "u", "unbuffered", "K", "kill-on-bad-exit", "mpi", "m",
                         "distribution", "export", "cpu-bind", "gpu-bind", "gpus-per-task", "W",
                         "wait", "D", "chdir", "o", "output", "e", "error"), SET),
    },
    ("l", "label", "u", "unbuffered", "K", "kill-on-bad-exit", "k", "no-kill", "E", "H", "hold",
     "O", "overcommit", "Q", "quiet", "s", "oversubscribe", "v", "verbose", "X", "contiguous",
     "exact", "exclusive", "overlap", "pty", "spread-job", "use-min-nodes", "whole"),
)  # fmt: skip
_MPI = ForeignLauncher(
    "mpirun",
    {
        "n": RANKS, "np": RANKS, "c": RANKS, "npernode": GPUS, "ppn": GPUS, "N": GPUS,
        "x": ENV, "env": ENV, "genv": ENV,
        **dict.fromkeys(("H", "host", "hosts", "hostfile", "machinefile", "f", "bind-to", "map-by",
                         "rank-by", "tag-output", "allow-run-as-root", "oversubscribe", "genvall",
                         "pernode", "mca", "gmca"), SET),
    },
    ("tag-output", "allow-run-as-root", "oversubscribe", "genvall", "pernode", "report-bindings",
     "timestamp-output", "nolocal", "v", "verbose", "q", "quiet", "bynode", "byslot"),
    {"mca": 2, "gmca": 2, "env": 2, "genv": 2},
    more={"slurm": ("--launcher", "mpi")},
)  # fmt: skip
_HOROVODRUN = ForeignLauncher(
    "horovodrun",
    {
        "np": RANKS, "num-proc": RANKS,
        **dict.fromkeys(("H", "hosts", "hostfile", "gloo", "mpi", "verbose", "p", "ssh-port",
                         "network-interfaces"), SET),
    },
    ("gloo", "mpi", "verbose", "disable-cache", "autotune", "tcp", "log-with-timestamp"),
    more=dict.fromkeys(("slurm", "local"), ("--launcher", "horovod")),
)  # fmt: skip
_DEEPSPEED = ForeignLauncher(
    "deepspeed",
    {"num-gpus": GPUS, "num-nodes": NODES, "no-local-rank": SET, **_SCRIPT, **_RENDEZVOUS},
    ("module", "no-python", "no-local-rank", "force-multi", "elastic-training", "save-pid"),
    python=True,
)
LAUNCHERS = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN._replace(name="torch.distributed.run"),
    "torch.distributed.launch": _TORCHRUN._replace(
        name="torch.distributed.launch", needs="use-env"
    ),
    "accelerate launch": _ACCELERATE,
    "accelerate-launch": _ACCELERATE,
    "srun": _SRUN,
    **{name: _MPI._replace(name=name)
       for name in ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")},
    "horovodrun": _HOROVODRUN,
    "deepspeed": _DEEPSPEED,
}  # fmt: skip
# `python -m MODULE` -> the launcher that it is.
MODULES = {
    "torch.distributed.run": "torch.distributed.run",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "horovod.runner.launch": "horovodrun",
    "deepspeed.launcher.runner": "deepspeed",
}
