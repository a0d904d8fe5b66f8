"""The error tree. Each error says what is wrong, where, and what to do.

    HpcddpError             1   a job or hpcddp failed
    ├── UserError           2   an option, job file, template or profile is wrong
    │   ├── JobFileError        an error in a job file, a key or a value
    │   ├── TopologyError       invalid nodes, GPUs, ranks or host lists
    │   ├── TemplateError       an error in a template, or a value not allowed in a script
    │   ├── ClusterError        an error in a cluster profile, or a limit that it sets
    │   ├── RunError            a run does not exist, or has the wrong state
    │   │   └── RunUnreadable       the files of a run cannot be read now
    │   └── ObjectUnreadable    a file or object of a store cannot be read
    │       └── ObjectMissing   a file or object of a store does not exist
    ├── SubmissionRefused   1   sbatch rejected the job
    ├── SlurmUnreachable    3   Slurm does not answer
    │   └── SlurmMissing        a program of Slurm is not installed
    ├── StoreUnreachable    1   a store of data does not answer
    ├── RankMapError        1   the started ranks are not the planned ranks
    ├── NodeUnfit           1   a node computes slowly, in two measurements
    ├── StageError          1   data could not be copied to a node's disk
    ├── CheckpointError     1   a checkpoint is damaged or missing
    │   ├── CheckpointForeign     a checkpoint of another model or format
    │   ├── CheckpointsDamaged    checkpoints exist, and all are damaged
    │   └── CheckpointUnreadable  a checkpoint cannot be read for minutes
    ├── Diverged            1   the loss or the weights are nan or infinite, or exploded
    ├── LeaseLost           1   a newer attempt owns the run folder
    ├── RankError           1   a rank on a Dask worker failed
    └── SandboxError        1   the sandbox cannot start or stop

The number is the exit code of the command line.
"""

from typing import Any


def install_extra(name: str) -> str:
    """The hint for a package that an extra of hpcddp installs."""
    return (
        f"install the extra `{name}` of hpcddp: pip install '.[{name}]' in its clone, "
        f"or 'WHEEL[{name}]' with the path of its wheel"
    )


class HpcddpError(Exception):
    """Base of all errors for users.

    Args:
        what: what is wrong, without a full stop.
        where: the file, key, option or line.
        hint: what to do.
    """

    exit_code = 1
    kind = "crash"  # of a failed rank; see error_record.py

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return _shown(f"{text}\n  {self.hint}" if self.hint else text)


def _shown(text: str) -> str:
    """Text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class UserError(HpcddpError):
    exit_code = 2
    kind = "mistake"


class JobFileError(UserError):
    pass


class TopologyError(UserError):
    pass


class TemplateError(UserError):
    pass


class ClusterError(UserError):
    pass


class RunError(UserError):
    pass


class RunUnreadable(RunError):
    kind = "crash"


class ObjectUnreadable(UserError):
    pass


class ObjectMissing(ObjectUnreadable):
    pass


class SubmissionRefused(HpcddpError):
    pass


class SlurmUnreachable(HpcddpError):
    exit_code = 3


class SlurmMissing(SlurmUnreachable):
    pass


class StoreUnreachable(HpcddpError):
    pass


class RankMapError(HpcddpError):
    """Raised on all ranks of an attempt that cannot train as planned.

    Args:
        facts: for error.json, in place of the raising rank's own: the failed rank and its host, and
            ``bad_host`` if the next attempt must avoid that host.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "", **facts: Any) -> None:
        super().__init__(what, where=where, hint=hint)
        self.facts = facts


class NodeUnfit(HpcddpError):
    """Raised on all ranks together if a node is slow in two measurements.

    Args:
        host: the node, which the next attempt must avoid.
    """

    kind = "node"

    def __init__(self, what: str, host: str) -> None:
        hint = 'tell your administrators; preflight = "off" leaves the checks out'
        super().__init__(what, where="preflight", hint=hint)
        self.facts = {"host": host, "bad_host": True}


class StageError(HpcddpError):
    pass


class CheckpointError(HpcddpError):
    pass


class CheckpointForeign(CheckpointError):
    kind = "foreign"


class CheckpointsDamaged(CheckpointError):
    kind = "damaged"


class CheckpointUnreadable(CheckpointError):
    """Raised on all ranks together.

    Args:
        facts: the rank that could not read, and its host.
    """

    def __init__(self, what: str, facts: dict[str, Any], *, where: str, hint: str) -> None:
        super().__init__(what, where=where, hint=hint)
        self.facts = facts


class Diverged(HpcddpError):
    """Raised on all ranks at the same step.

    Args:
        facts: the diverged rank and its host, the optimizer step (from 1) and the loss.
    """

    kind = "diverged"

    def __init__(self, what: str, facts: dict[str, Any]) -> None:
        hint = "lower train.lr, set train.clip_norm (or lower it), or set "
        hint += 'train.on_divergence = "skip" or "rollback" to omit such steps'
        super().__init__(what, hint=hint)
        self.facts = facts


class LeaseLost(HpcddpError):
    kind = "lease"


class RankError(HpcddpError):
    pass


class SandboxError(HpcddpError):
    pass
