"""Draw the pictures of `watch`, `report` and `dashboard` for the documentation, from a real run.

    python docs/pictures.py [FOLDER]

It starts a sandbox, trains on 2 x 2 ranks of which one becomes slow, preempts the run twice, and
opens its pages in Chromium. It needs root, Slurm's packages and Chromium, which `scripts/test`
installs. It takes two to three minutes, and leaves only the pictures.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcddp.sandbox.cluster import Sandbox, Settings
from hpcddp.slurm.environment import clean

HERE = Path(__file__).parent
HPCDDP = str(Path(sys.executable).with_name("hpcddp"))
WIDTH, COLUMNS, LINES = 1200, 100, 32
# The shipped job digits, in which rank 2 becomes slow after some steps.
TASK = """
import sys, time
import torch.distributed as dist
from hpcddp.planning import resources
sys.path.insert(0, str(resources.folder("jobs")))
import digits
from digits import loss, metrics
from torch import nn

class Model(nn.Module):
    def __init__(self, width, slow_from):
        super().__init__()
        self.net, self.steps, self.slow_from = digits.model(width), 0, slow_from

    def forward(self, x):
        self.steps += self.training
        time.sleep(0.05 + 0.06 * (dist.get_rank() == 2 and self.steps > self.slow_from))
        return self.net(x)

def model(width=32, slow_from=120):
    return Model(width, slow_from)

def dataset(split):
    return digits.dataset(split)
"""
JOB = """
task = "pets.py"
global_batch = 64
max_steps = 900
[train]
lr = 2e-3
log_every = 5
[checkpoint]
every = 100
"""
BROWSER = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp") as parent:
        box = Sandbox(Path(parent, "slurm"))
        box.up(Settings(nodes=2, gpus=2, accounting=False))
        try:
            desk = Desk(Path(parent, "work"), clean(os.environ) | box.environ())
            run = desk.train()
            desk.draw(run, target)
        finally:
            box.down()


class Desk:
    """A user's folder with a job, on the sandbox."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder, self.environ = folder, {**environ, "LANG": "C.UTF-8"}
        (folder / "jobs").mkdir(parents=True)
        (folder / "jobs/pets.py").write_text(TASK)
        (folder / "jobs/pets.toml").write_text(JOB)

    def __call__(self, *words: str) -> str:
        return subprocess.run(
            words, cwd=self.folder, env=self.environ, check=True, capture_output=True, text=True
        ).stdout

    def train(self) -> str:
        """The run, in its third attempt, with one slow rank."""
        self.submit("--name", "pets-small", "--set", "max_steps=200")
        self.until("last", lambda s: s["state"] == "COMPLETED")
        run = self.submit()
        for attempt, step in ((1, 220), (2, 480)):
            self.until(run, lambda s, a=attempt, n=step: s["attempt"] == a and s["step"] > n)
            wrap = ("--partition=high", "--exclusive", "--nodes=2", "--wrap=sleep 4")
            self("sbatch", "--output=/dev/null", *wrap)
        self.until(run, lambda s: s["attempt"] == 3 and s["step"] > 700)
        return run

    def submit(self, *words: str) -> str:
        size = ("--nodes", "2", "--gpus", "2", "--detach", "--json")
        line = self(HPCDDP, "submit", "pets", *size, *words).splitlines()[0]
        return str(json.loads(line)["run"])

    def until(self, run: str, good: Any) -> None:
        deadline = time.monotonic() + 300
        while not good(found := json.loads(self(HPCDDP, "status", run, "--json"))):
            if time.monotonic() > deadline or found["state"] == "FAILED":
                sys.exit(f"the run did not come to the expected state: {found}")
            time.sleep(0.5)

    def draw(self, run: str, target: Path) -> None:
        svg(self.terminal(run), target / "watch.svg")
        socket = ("--port", "0")
        server = subprocess.Popen(
            [HPCDDP, "dashboard", *socket], cwd=self.folder, env=self.environ,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            address = next(m[0] for x in server.stdout or () if (m := re.search(r"http://\S+", x)))
            shoot(address, target / "dashboard.png", height=420)
        finally:
            server.terminate()
            server.wait()
        self.until(run, lambda s: s["state"] == "COMPLETED")
        page = self.folder / "report.html"
        self(HPCDDP, "report", run, "-o", str(page))
        shoot(page.as_uri(), target / "report.png")

    def terminal(self, run: str) -> str:
        """The output of `watch --once` on a terminal."""
        size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
        ours, theirs = pty.openpty()
        words = [HPCDDP, "watch", run, "--once"]
        process = subprocess.Popen(
            words, cwd=self.folder, env=self.environ | size, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        found = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            found += data
        process.wait()
        os.close(ours)
        return found.decode()


def svg(text: str, path: Path) -> None:
    """Draw a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(text.replace("\r", "")))
    path.write_text(console.export_svg(title="hpcddp watch last"))


def shoot(url: str, path: Path, height: int = 0) -> None:
    """Draw a page; the whole page if no height is given."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path="/usr/bin/chromium", args=list(BROWSER))
        page = browser.new_page(viewport={"width": WIDTH, "height": height or 800})
        page.goto(url)
        page.wait_for_timeout(2500)  # two updates of the dashboard
        page.screenshot(path=path, full_page=not height)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
