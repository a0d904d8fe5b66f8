"""Runs a Python script in an existing process, as the interpreter would."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpcddp.errors import UserError

FLAGS = ("-P", "-u")  # options of Python that need no new process
EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_")  # variables that Python or packages read first


class Script:
    """A Python command that can run in an existing process, also after `env NAME=VALUE`.

    Raises:
        UserError: it is another program, or has options that need a new Python.
    """

    def __init__(self, words: Sequence[str]) -> None:
        rest = list(words)
        self.environ: dict[str, str] = {}
        if Path(rest[0]).name == "env":
            rest.pop(0)
            while rest and "=" in rest[0]:
                name, _, self.environ[name] = rest.pop(0).partition("=")
            if early := [n for n in self.environ if n.startswith(EARLY)]:
                raise UserError(
                    f"{early[0]} has no effect with the launcher fork: Python and its packages "
                    f"have read it before",
                    where="launcher",
                    hint=f"set it for the job: --env {early[0]}=VALUE",
                )
        self.python = rest.pop(0) if rest else ""
        self.flags = []
        while rest and rest[0] in FLAGS:
            self.flags.append(rest.pop(0))
        self.module = rest[0] == "-m" if rest else False
        if self.module:
            rest.pop(0)
        if not Path(self.python).name.startswith("python") or not rest or rest[0].startswith("-"):
            raise UserError(
                f"the launcher fork requires `python SCRIPT` or `python -m MODULE`, got "
                f"{' '.join(words):.60}",
                where="launcher",
                hint="use --launcher srun, or spawn on this machine",
            )
        self.name, self.arguments = rest[0], rest[1:]

    def run(self) -> NoReturn:
        """Run the script as `__main__`, and exit as Python would."""
        os.environ.update(self.environ)
        sys.argv = [self.name, *self.arguments]
        if "-P" not in self.flags:
            own = Path.cwd() if self.module else Path(self.name).resolve().parent
            sys.path.insert(0, str(own))
        try:
            if self.module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                _execute(self.name)
        except Exception:
            _tell(sys.exc_info())
            sys.exit(1)
        sys.exit(0)


def other_python(script: Script) -> Path | None:
    """The Python that a command names, if it is not that of this process."""
    named = Path(shutil.which(script.python) or script.python)
    return None if named.absolute().parent == Path(sys.executable).parent else named


def in_process(words: Sequence[str]) -> Script | None:
    """A command that this process can run itself; None for one that must replace it."""
    try:
        script = Script(words)
    except UserError:
        return None
    return None if other_python(script) else script


def _execute(path: str) -> None:
    """Run a script in a new module `__main__`, as the interpreter does."""
    main: Any = types.ModuleType("__main__")
    file = Path(path).absolute()
    main.__file__, main.__builtins__ = str(file), __builtins__
    sys.modules["__main__"] = main
    exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), main.__dict__)


def _tell(failure: Any) -> None:
    """Print an exception as the interpreter would, without the frames above the script's."""
    kind, error, trace = failure
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    sys.excepthook(kind, error.with_traceback(trace), trace)
