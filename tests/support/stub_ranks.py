"""Processes that look like the ranks of an attempt, started and ended by a test."""

import os
import subprocess
import sys
from pathlib import Path

from sites import CHECKOUT, SUPPORT

from hpcddp.topology import Topology


class StubRanks:
    """Ranks of attempt 1 of a run folder; ``modes`` says how each waits, see stub_rank.py."""

    def __init__(self, run_dir: Path, modes: list[str]) -> None:
        facts = {"HPCDDP_RUN_DIR": str(run_dir), "HPCDDP_ATTEMPT": "1"}
        environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), **facts}
        self.processes = [
            subprocess.Popen(
                self._words(mode), env={**environ, **rank.to_env()}, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, cwd=run_dir.parent,
            )
            for rank, mode in zip(Topology(1, len(modes)).ranks(), modes, strict=True)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdout and process.stdout.readline() == b"up\n"

    def _words(self, mode: str) -> list[str]:
        if mode == "shell":  # a program that is not Python
            return ["bash", "-c", "echo up; read -r line < <(sleep 600)"]
        return [sys.executable, str(SUPPORT / "stub_rank.py"), mode]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
