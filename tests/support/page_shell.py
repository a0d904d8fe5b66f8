"""The shell of a person who follows a page: one for all of its commands, wherever they run."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from sites import CHECKOUT

SECONDS = 600.0  # that a command may take, also on a slow machine
# RUN and JOB in a command, and the address of the repository.
MEANT = {"RUN": "last", "JOB": "digits", "URL": str(CHECKOUT)}
PLACEHOLDER = re.compile(rf"(?<![\w/.-])(?:{'|'.join(MEANT)})(?![\w/.=-])")
# A page makes no environment and installs nothing: the environment of the tests has all it names.
INSTALL = """
python3() {
  if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && : >"$3/bin/activate"
  else command python3 "$@"; fi
}
pip() {
  local said code
  said=$(command python3 -m pip "$@" --dry-run --no-index --no-build-isolation 2>&1)
  code=$?
  echo "$said"
  case "$said" in *"does not provide the extra"*) return 1 ;; esac
  return "$code"
}
"""


class Shell:
    """Runs commands one after the other; exported variables and the current folder stay.

    Args:
        folder: where it begins.
        home: the person's home, where it keeps its state too.
        environ: its variables, by the place where a command runs.
    """

    def __init__(self, folder: Path, home: Path, environ: Mapping[str, Mapping[str, str]]) -> None:
        self.cwd, self.home = folder, home
        own = {"HOME": str(home), "PWD": str(folder)}
        self.environ = {where: {**others, **own} for where, others in environ.items()}
        self._state = home / "state"
        self._where = ""
        for made in (folder, home):
            made.mkdir(parents=True, exist_ok=True)

    def run(self, command: str, where: str, *, until: str = "", most: float = 0) -> tuple[str, int]:
        """What a command prints, and its exit code; it gets a Ctrl-C when it has printed `until`,
        or after `most` seconds, where there are such."""
        output = self.home / "output"
        with output.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", self._script(command, where)], stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, env=self.environ[where],
                cwd=self.cwd, start_new_session=True,
            )  # fmt: skip
        try:
            if until or most:
                self._wait(process, output, until, most or SECONDS)
                os.killpg(process.pid, signal.SIGINT)
            code = process.wait(SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if (place := self.home / "cwd").exists():
            self.cwd = Path(place.read_text().rstrip("\n"))
        return self._text(output), code

    def _script(self, command: str, where: str) -> str:
        command = PLACEHOLDER.sub(lambda match: MEANT[match[0]], command)
        state = shlex.quote(str(self._state))
        return "\n".join((
            f"[ ! -e {state} ] || . {state}", *self._change(where), INSTALL, command,
            f'code=$?; export -p >{state}; pwd -P >"$HOME/cwd"; exit $code',
        ))  # fmt: skip

    def _change(self, where: str) -> list[str]:
        """From one place to another: the variables that differ."""
        before, after = self.environ.get(self._where, {}), self.environ[where]
        self._where = where
        gone = [f"unset {name}" for name in before if name not in after]
        new = (name for name in after if before.get(name) != after[name] and name != "PWD")
        return gone + [f"export {name}={shlex.quote(after[name])}" for name in new]

    def _wait(
        self, process: subprocess.Popen[bytes], output: Path, until: str, most: float
    ) -> None:
        deadline = time.monotonic() + most
        while process.poll() is None and time.monotonic() < deadline:
            if until and until in self._text(output):
                time.sleep(0.5)  # a person reads it first; the shell has begun the next command
                return
            time.sleep(0.1)

    @staticmethod
    def _text(output: Path) -> str:
        return output.read_text(encoding="utf-8", errors="replace")
