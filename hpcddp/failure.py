"""Which rank failed first, and why: attempts/N/error.json (layer 0).

When one rank fails, the others fail at their next collective, and each has a traceback that tells
nothing. So the first one writes down what happened to it, and the others only say who it was.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from typing import Any

from hpcddp.errors import HpcddpError
from hpcddp.rundir import AttemptDir, token, write_json


def host() -> str:
    """This node's name: Slurm's, where there is one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def report(error: BaseException, attempt: AttemptDir, rank: int | None) -> str:
    """Write error.json if no rank did so before, and say what this rank prints."""
    record = _record(error, rank)
    first = _claim(attempt, record)
    if first is not None:
        who = f"rank {first['rank']}" if first.get("rank") is not None else "another rank"
        what = f" ({first['type']}: {first['message'].splitlines()[0]})" if first else ""
        return f"{_name(rank)} stopped: {who} failed first{what}"
    if isinstance(error, HpcddpError):
        return f"{_name(rank)} on {record['host']}: {error}"
    return f"{_name(rank)} on {record['host']} failed\n{record['traceback']}".rstrip()


def _name(rank: int | None) -> str:
    return "a rank" if rank is None else f"rank {rank}"


def _record(error: BaseException, rank: int | None) -> dict[str, Any]:
    own = isinstance(error, HpcddpError)  # says what to do; where it was raised is no help
    return {
        "rank": rank,
        "host": host(),
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "traceback": "" if own else "".join(traceback.format_exception(error)),
        "time": time.time(),
    }


def _claim(attempt: AttemptDir, record: dict[str, Any]) -> dict[str, Any] | None:
    """Write the record as the first of all ranks; None, or what the first one wrote.

    A link takes the name with the whole record behind it: no rank reads half of one.
    """
    aside = attempt.error.with_name(f".error.{token(4)}")
    try:
        attempt.path.mkdir(exist_ok=True)
        write_json(aside, record)
        os.link(aside, attempt.error)
    except FileExistsError:
        return _read(attempt)
    except OSError:  # the folder is gone or full: this rank speaks for itself
        return None
    finally:
        aside.unlink(missing_ok=True)
    return None


def _read(attempt: AttemptDir) -> dict[str, Any]:
    try:
        data = json.loads(attempt.error.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # gone, or not ours
        return {}
    return data if isinstance(data, dict) else {}
