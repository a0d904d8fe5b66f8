"""`hpcddp init`: the job file for a script or a task module of a project."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcddp.errors import UserError
from hpcddp.keys import toml_text
from hpcddp.planning import jobfile, key_schema
from hpcddp.planning.project.project_look import TASK, ScriptFile
from hpcddp.rundir import write_text
from hpcddp.sizes import NodeRange
from hpcddp.spec import KEYS, JobSpec

SCHEMA = "job.schema.json"
TITLE = "job of hpcddp"  # of the schema
HEAD = """\
#:schema ./{schema}
# Made by `hpcddp init`; `hpcddp config --explain` explains the keys.
"""
# Kind of a script -> the title of its page, where more than the job file is needed.
PAGES = {
    "Horovod": "Move from Horovod to DDP",
    "Lightning": "Use Lightning",
    "Accelerate": "Use Hugging Face Accelerate",
    "transformers": "Use the transformers Trainer",
}


class JobSize(NamedTuple):
    """The size of a job.

    Args:
        gpus: per node; on CPUs, processes per node.
        gpu_type: "" for any.
        device: "" for the default.
    """

    nodes: NodeRange
    gpus: int
    gpu_type: str = ""
    device: str = ""


@dataclass(frozen=True)
class NewJob:
    """A job file that may not be written yet.

    Args:
        path: of the file.
        text: what it shall hold.
    """

    path: Path
    text: str

    def differences(self) -> list[str]:
        """The lines in which the present file differs; none if it is equal, or missing."""
        if not self.path.exists():
            return []
        present = self.path.read_text(encoding="utf-8", errors="replace")
        lines = difflib.unified_diff(
            present.splitlines(), self.text.splitlines(), str(self.path), "new", lineterm=""
        )
        return list(lines)

    @property
    def schema(self) -> Path:
        """The schema that the file names, beside it."""
        return self.path.with_name(SCHEMA)

    @property
    def foreign_schema(self) -> bool:
        """Whether a file that hpcddp did not write has the name of the schema."""
        if not self.schema.exists():
            return False
        return TITLE not in self.schema.read_text(encoding="utf-8", errors="replace")

    def make_folder(self) -> None:
        """Make the folder of the file.

        Raises:
            UserError: that is impossible.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"the folder cannot be created: {error.strerror}"
            hint = "job files lie in it: rename the file, or work in a folder of yours"
            raise UserError(what, where=str(self.path.parent), hint=hint) from None

    def save(self) -> None:
        """Write the file, and the schema that it names beside it."""
        self.make_folder()
        write_text(self.schema, schema_text())
        write_text(self.path, self.text)


def schema_text() -> str:
    """The JSON Schema of job files."""
    made = key_schema.schema(KEYS, TITLE, {"nodes": ("string", "integer")})
    return json.dumps(made, indent=1) + "\n"


def of(candidate: ScriptFile, folder: Path, size: JobSize) -> NewJob:
    """The job file for a script or a task module.

    Args:
        folder: of the project.
    """
    name = jobfile.command_layer([str(candidate.path)]).values["name"]
    lines = "".join(_lines(candidate, size))
    return NewJob(folder / "jobs" / f"{name}.toml", HEAD.format(schema=SCHEMA) + lines)


def _lines(candidate: ScriptFile, size: JobSize) -> Iterator[str]:
    """The lines of the file."""
    if candidate.kind == TASK:
        yield f"task = {_quoted(f'../{candidate.path}')}\n"
    else:
        words = ", ".join(map(_quoted, candidate.command))
        yield f"command = [{words}]  # each rank runs it\n"
    comments = {"nodes": "or a range: 1-4", "gpus": "per node, one rank each"}
    if size.device == "cpu":
        comments["gpus"] = "processes per node, on CPUs"
    for name, value in {**size._asdict(), "nodes": str(size.nodes)}.items():
        if value:
            text = _quoted(value) if isinstance(value, str) else toml_text(value)
            yield f"{name} = {text}" + (f"  # {comments[name]}\n" if name in comments else "\n")
    if candidate.kind == TASK and (batch := _batch(size)):
        yield f"global_batch = {batch}  # samples of a step; it divides over all ranks\n"
    if candidate.kind == "Horovod":
        yield 'launcher = "horovod"\n'
    if candidate.outside:
        named = ", ".join(candidate.outside[:3])
        yield f"snapshot = false  # it reads {named}, outside of the project: no copy of the code\n"


def _batch(size: JobSize) -> int:
    """A global batch that divides over the ranks of each number of nodes; 0 if the default one
    does."""
    ranks = math.lcm(*(n * size.gpus for n in range(size.nodes.min, size.nodes.max + 1)))
    usual = JobSpec().global_batch
    return 0 if usual % ranks == 0 else -(-usual // ranks) * ranks


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
