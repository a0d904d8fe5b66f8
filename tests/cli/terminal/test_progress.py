"""The progress bar of a run that is followed: what a person sees, whatever the run tells."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest
from sites import Site, record_run
from terminal import Terminal

from hpcddp.cli.terminal.progress import Progress
from hpcddp.rundir import RunDir


class Screen(io.StringIO):
    """A terminal in memory."""

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        screen = pyte.Screen(80, 24)
        pyte.Stream(screen).feed(self.getvalue().replace("\n", "\r\n"))
        return "\n".join(line.rstrip() for line in screen.display).strip()


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def shown() -> Iterator[tuple[Screen, Progress]]:
    """A progress bar on a screen."""
    screen = Screen()
    with contextlib.redirect_stdout(screen), Progress() as progress:
        yield screen, progress


def train(step: int, **more: object) -> dict[str, object]:
    return {"event": "train", "step": step, "loss": 0.25, "samples_per_s": 77.0, **more}


def test_a_training_that_knows_its_end_has_a_bar() -> None:
    with shown() as (screen, progress):
        progress.show({"event": "start", "step": 0, "total_steps": 400})
        progress.show(train(7))
        progress.bar.refresh()
        assert "step 7/400 ╸━━━" in screen.text and "loss 0.25  77 samples/s" in screen.text


def test_a_loop_of_ones_own_tells_its_steps() -> None:
    with shown() as (screen, progress):
        progress.show({"event": "start", "step": 0, "epoch": 0, "resumed": None})
        progress.show(train(7))
        progress.bar.refresh()
        assert screen.text == "step 7 loss 0.25  77 samples/s"
        progress.show({"event": "step", "step": 8})
        progress.bar.refresh()
        assert screen.text == "step 8"


@pytest.mark.parametrize(
    "record",
    [{}, {"event": 5}, {"event": "start"}, {"event": "start", "step": "x", "total_steps": []},
     {"event": "train", "step": None, "loss": None, "samples_per_s": "fast"},
     train(10**400, loss=10**400)],
)  # fmt: skip
def test_records_of_any_kind(record: dict[str, object]) -> None:
    with shown() as (screen, progress):
        progress.show(record)
        progress.show(train(7))
        progress.bar.refresh()
        assert "step 7" in screen.text


def test_each_attempt_is_followed_and_each_line_read_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    record_run(run)

    def tell(number: int, *records: dict[str, object]) -> str:
        run.attempt(number).path.mkdir(exist_ok=True)
        with run.attempt(number).metrics.open("a") as f:
            f.writelines(json.dumps(record) + "\n" for record in records)
        progress.follow(run)
        progress.bar.refresh()
        return screen.text

    with shown() as (screen, progress):
        progress.follow(run)
        start = {"event": "start", "total_steps": 400}
        assert "step 199/400" in tell(1, start | {"step": 0}, *map(train, range(100, 200)))
        metrics = run.attempt(1).metrics
        size = metrics.stat().st_size
        metrics.write_text((json.dumps(train(5)) + "\n").ljust(size - 1) + "\n")
        assert "step 199/400" in tell(1)  # who read it again would say 5
        assert "step 200/400" in tell(1, train(200))
        assert "step 151/400" in tell(2, start | {"step": 150}, train(151))


def test_what_a_program_prints_is_not_obeyed() -> None:
    with shown() as (screen, progress):
        progress.write(b"0: \x1b]0;owned\x07\x1b[2J [bold]b[/bold] \xff :smile: 1%\r\n")
        progress.bar.refresh()
        line = "0: \\x1b]0;owned\\x07 [bold]b[/bold] \ufffd :smile: 1%"
        assert line in screen.text and "\x1b]" not in screen.getvalue()
        assert "\x1b[2J" not in screen.getvalue()


@pytest.mark.parametrize("label", ["", "12: "])
def test_of_a_bar_of_the_programs_own_its_last_state_is_shown(label: str) -> None:
    with shown() as (screen, progress):
        progress.write(f"{label}  0%|   |\r 50%|## |\r100%|###|\n".encode())
        progress.bar.refresh()
        assert f"{label}100%|###|" in screen.text and "50%" not in screen.text


ATTACHED = """
import time, torch, hpcddp
model = torch.nn.Linear(2, 1)
run = hpcddp.attach(model, torch.optim.SGD(model.parameters(), 0.1), log_every=1, save_every=0)
while run.steps < 60:
    run.step(torch.tensor(0.25))
    time.sleep(0.1)
run.finish()
"""


def test_an_attached_loop_is_followed_to_its_end(site: Site) -> None:
    site.write("train.py", ATTACHED)
    with Terminal("submit", "--", sys.executable, "train.py") as terminal:
        terminal.until("step ", "loss 0.25")
        assert terminal.left() == 0
        assert "COMPLETED" in terminal.text and b"Traceback" not in terminal.raw


def test_a_resumed_run_shows_no_records_of_its_earlier_attempts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for folder in (run, run.attempt(1)):
        folder.path.mkdir(parents=True)
    run.attempt(1).metrics.write_text(json.dumps(train(7)) + "\n")
    screen = Screen()
    with contextlib.redirect_stdout(screen), Progress(after=1) as progress:
        progress.follow(run)
        progress.bar.refresh()
        assert "starting" in screen.text and "step 7" not in screen.text
        run.attempt(2).path.mkdir()
        run.attempt(2).metrics.write_text(json.dumps(train(8)) + "\n")
        progress.follow(run)
        progress.bar.refresh()
        assert "step 8" in screen.text
