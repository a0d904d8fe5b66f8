"""Which rank failed first, and why: attempts/N/error.json.

When one rank fails, the others fail at their next collective with useless tracebacks. So the first
rank records its failure, and the others only name that rank. A record that only says that another
rank is gone is replaced by that rank's own.

    kind      meaning                                             a restart
    crash     an exception                                        may help
    oom       no memory left, on the GPU or the node              may help
    mistake   a job file, or code that fails before any step      does not
    foreign   the checkpoint is of another model or format        does not
    environment  a step before the ranks' start failed        on another node may
    node      a node failed its checks twice                  on another node does
    lost      a node gives no sign of life                    on another node does
    damaged   checkpoints are there, and none is whole            does not
    hang      no step for too long                                helps
    diverged  the numbers went wrong                              does not
    lease     the attempt is superseded                           has happened
    peer      another rank is gone                                depends on the cause
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Mapping
from typing import Any

from hpcddp.errors import HpcddpError
from hpcddp.rundir import AttemptDir, token, write_json

# Errors of a rank whose peer is gone: a consequence, not a cause.
LOST_PEER = re.compile(
    r"gloo/transport|[Cc]onnection (closed|reset|refused)|NCCL|Dist(Backend|Network|Store)Error"
)
NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory")
# torch's message about an operation that train.deterministic does not allow.
NO_ALGORITHM = re.compile(r"does not have a deterministic implementation")
# A network, a disk or a device may have caused these. Before any step, other errors would recur.
MAY_PASS = (RuntimeError, OSError, EOFError)


def host() -> str:
    """This node's name: Slurm's, where there is one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def report(
    error: BaseException, attempt: AttemptDir, rank: int | None, *, stepped: bool = True
) -> str:
    """Write error.json if no rank has done so; returns what this rank prints.

    Args:
        stepped: this attempt has taken an optimizer step.
    """
    record = _record(error, rank, stepped)
    first = claim(attempt, record)
    if first is not None:
        who = _name(first["rank"]) if first.get("rank") is not None else "another rank"
        what = f" ({first['type']}: {first['message'].splitlines()[0]})" if first else ""
        return f"{_name(rank)} stopped: {who} failed first{what}"
    if isinstance(error, HpcddpError):
        return f"{_name(record['rank'])} on {record['host']}: {error}"
    return f"{_name(rank)} on {record['host']} failed\n{record['traceback']}".rstrip()


def report_for_all(attempt: AttemptDir, kind: str, message: str, **facts: Any) -> None:
    """Write error.json for a failure that is none of a rank.

    Args:
        facts: further ones: ``host`` in place of this one, ``bad_host`` to avoid it.
    """
    record = {"rank": None, "host": host(), "type": kind, "kind": kind, "message": message}
    claim(attempt, {**record, "traceback": "", "time": time.time(), **facts})


def is_shared(attempt: AttemptDir) -> bool:
    """Whether all ranks have recorded the same failure."""
    with contextlib.suppress(
        OSError, ValueError, IndexError
    ):  # a network file system may mix lines
        lines = attempt.failures.read_text(encoding="utf-8").splitlines()
        failures = dict(line.split(" ", 1) for line in lines)
        return len({*failures.values()}) == 1 and lines[0].split(" ")[1] == str(len(failures))
    return False


def _name(rank: int | None) -> str:
    return "a rank" if rank is None else f"rank {rank}"


def _record(error: BaseException, rank: int | None, stepped: bool) -> dict[str, Any]:
    own = isinstance(error, HpcddpError)  # has a remedy, and needs no traceback
    return {
        "rank": rank,
        "host": host(),
        "type": type(error).__name__,
        "kind": kind_of(error, stepped=stepped),
        "message": str(error) or type(error).__name__,
        "traceback": "" if own else "".join(traceback.format_exception(error)),
        "time": time.time(),
        **getattr(error, "facts", {}),  # about another rank
    }


def kind_of(error: BaseException, *, stepped: bool) -> str:
    """The kind of a failure; see the table above."""
    if isinstance(error, HpcddpError):
        return error.kind
    text = f"{type(error).__name__} {error}"
    if isinstance(error, MemoryError) or "OutOfMemoryError" in text or NO_MEMORY.search(text):
        return "oom"
    # torch's own are RuntimeErrors; a ConnectionError is from the user's network.
    if isinstance(error, RuntimeError) and LOST_PEER.search(text):
        return "peer"
    if NO_ALGORITHM.search(text):
        return "mistake"
    return "mistake" if not stepped and not isinstance(error, MAY_PASS) else "crash"


def of_a_peer(error: BaseException | None) -> bool:
    """Whether a rank has failed since another one is gone, by the error or what caused it."""
    while error is not None:
        if kind_of(error, stepped=True) == "peer":
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def is_peer(record: Mapping[str, Any]) -> bool:
    """Whether a record only says that another rank is gone."""
    if "kind" in record:
        return bool(record["kind"] == "peer")
    return bool(LOST_PEER.search(f"{record.get('type')} {record.get('message')}"))


def claim(attempt: AttemptDir, record: dict[str, Any]) -> dict[str, Any] | None:
    """Write the record if this rank is the first; None, or the first one's record.

    A link creates the file with its whole content: no rank reads half a record.
    """
    aside = attempt.error.with_name(f".error.{token(4)}")
    try:
        attempt.path.mkdir(exist_ok=True)
        write_json(aside, record)
        os.link(aside, attempt.error)
    except FileExistsError:
        first = _read(attempt)
        if is_peer(first) and not is_peer(record) and _take_over(attempt):
            aside.replace(attempt.error)
            return None
        return first
    except OSError:  # the folder is gone or full: this rank only prints
        return None
    finally:
        with contextlib.suppress(OSError):  # on a read-only disk
            aside.unlink(missing_ok=True)
    return None


def _take_over(attempt: AttemptDir) -> bool:
    """Move the record of a lost peer away; True for the one rank that may write the cause."""
    try:
        os.link(attempt.error, attempt.error.with_name(".error.peer"))
    except OSError:  # another rank did
        return False
    return True


def _read(attempt: AttemptDir) -> dict[str, Any]:
    try:
        data = json.loads(attempt.error.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # gone, or not ours
        return {}
    return data if isinstance(data, dict) else {}
