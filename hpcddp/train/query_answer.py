"""The answer to a question about a job's model, which compare/model_query.py asks: one JSON object
comes on stdin, and one goes back on stdout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from hpcddp.errors import HpcddpError


def answer(find: Callable[..., dict[str, Any]]) -> None:
    """Answer the one question on stdin. The task's prints go to stderr.

    Args:
        find: gets the question's keys.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        reply = find(**json.load(sys.stdin))
    except HpcddpError as error:
        reply = {"error": {"what": error.what, "where": error.where, "hint": error.hint}}
    with out:
        json.dump(reply, out)
