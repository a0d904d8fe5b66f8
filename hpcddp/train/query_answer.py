"""Answers a question of compare/model_query.py about a job's model: reads one JSON object from
stdin, and writes one to stdout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from hpcddp.errors import HpcddpError


def answer(find: Callable[..., dict[str, Any]]) -> None:
    """Answer the question on stdin. Prints of the task go to stderr.

    Args:
        find: called with the keys of the question.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        reply = find(**json.load(sys.stdin))
    except HpcddpError as error:
        reply = {"error": {"what": error.what, "where": error.where, "hint": error.hint}}
    with out:
        json.dump(reply, out)
