"""The error tree. Each error says what is wrong, where, and what to do.

    HpcddpError             1   a job or the tool failed
    ├── UserError           2   a flag, a job file, a template or a profile is wrong
    │   ├── JobFileError        a job file, a key or a value
    │   ├── TopologyError       nodes, GPUs, ranks and host lists
    │   ├── TemplateError       a template, or a value that cannot enter a script
    │   ├── ClusterError        a cluster profile, or a limit that it sets
    │   ├── RunError            a run that does not exist, or is not in the right state
    │   │   └── RunUnreadable       its files cannot be read now
    │   └── ObjectUnreadable    a file or an object of a store cannot be read, but others may be
    │       └── ObjectMissing   it is not there
    ├── SubmissionRefused   1   sbatch said no
    ├── SlurmUnreachable    3   Slurm does not answer
    │   └── SlurmMissing        one of its programs is not there
    ├── StoreUnreachable    1   a store of data does not answer
    ├── RankMapError        1   the ranks that started are not the ranks that were planned
    ├── StageError          1   data could not be copied to a node's disk
    ├── CheckpointError     1   a checkpoint is damaged or missing
    │   ├── CheckpointForeign     it is of another model, or of another version's format
    │   ├── CheckpointsDamaged    there are some, and none of them is whole
    │   └── CheckpointUnreadable  an I/O error, for minutes: what it holds is not known
    ├── Diverged            1   the loss or the weights are no numbers any more, or exploded
    ├── LeaseLost           1   a newer attempt owns the run dir
    ├── RankError           1   a rank on a Dask worker has failed
    └── SandboxError        1   the sandbox cannot start or stop

The number is the exit code of the command line.
"""

from typing import Any


class HpcddpError(Exception):
    """Base of all errors that a user can meet.

    Args:
        what: what is wrong, in one sentence without a full stop.
        where: the file, key, flag or line.
        hint: what to do about it.
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
    """A terminal shows what a name or a path holds, and obeys none of it."""
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
        facts: what error.json says in place of the raising rank's own: the rank and the host that
            are to blame; ``bad_host`` where the next attempt is to leave that host out.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "", **facts: Any) -> None:
        super().__init__(what, where=where, hint=hint)
        self.facts = facts


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
        facts: the rank that met it and its host, the step (optimizer steps, from 1) and the loss.
    """

    kind = "diverged"

    def __init__(self, what: str, facts: dict[str, Any]) -> None:
        hint = "a lower train.lr or train.clip_norm may cure it; "
        hint += 'train.on_divergence = "skip" or "rollback" leaves such steps out'
        super().__init__(what, hint=hint)
        self.facts = facts


class LeaseLost(HpcddpError):
    kind = "lease"


class RankError(HpcddpError):
    pass


class SandboxError(HpcddpError):
    pass
