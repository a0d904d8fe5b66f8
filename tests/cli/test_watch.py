"""`hpcddp watch` on a real terminal: what is on the screen, keys, signals, and bad input."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from import_hook import CALL, imported, roots
from local_runs import end_all
from made import made_run
from reported import single_run
from sites import Outcome, Site
from terminal import Terminal
from toy import TOY
from written import append

from hpcddp.rundir import RunDir, write_json

NAME = "pets-20261121-0253-a1b2"
RUNS = """
[ -n "$ASKED" ] && echo . >>"$ASKED"
echo "17|RUNNING|None|2026-11-21T02:53:00|2026-11-21T02:54:00|n[1-2]||{name}"
"""


@pytest.fixture
def run(site: Site) -> RunDir:
    """A run that works, after two preemptions, with a slow rank."""
    site.slurm(squeue=RUNS.format(name=NAME))
    return made_run(site.runs, cause=None, last=300)


@pytest.fixture
def watch(site: Site) -> Iterator[Callable[..., Terminal]]:
    """Watches the newest run on a terminal."""
    opened: list[Terminal] = []

    def start(*arguments: str, **more: object) -> Terminal:
        opened.append(Terminal("watch", "last", "--every", "0.1", *arguments, **more))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.__exit__()


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 50)])
def test_what_a_person_sees(
    run: RunDir, watch: Callable[..., Terminal], columns: int, lines: int
) -> None:
    write_json(run.attempt(3).error, {"rank": 1, "host": "n1", "message": "out of luck"})
    terminal = watch(columns=columns, lines=lines)
    text = terminal.until(
        "02:54:00 UTC",  # by squeue
        "job 17 on slurm, 2 nodes x 2 GPUs, n[1-2]", "300/400  75%", "50 s to go", "loss 0.2507",
        "44 samples/s", "0.5 s per step", "2% of it waiting for data", "3 attempts, 10 steps lost",
        "preempted  steps 121-260  10 lost", "running    steps 251-300", "1 dead (X), 1 slow (S)",
        "n1  0. 1X", "n2  2S 3.", "X rank 1 on n1: out of luck", "S ", "0: step 300",
        "1: <b>rank 1</b> says &amp;",
    )  # fmt: skip
    head = text.splitlines()[0]
    assert head.startswith(f"{NAME}  RUNNING") and head.endswith("q quits")
    assert any(0x2800 < ord(character) < 0x2900 for character in text)
    terminal.type(b"q")
    assert terminal.left() == 0
    terminal.check_clean()


def test_it_goes_on_with_the_run_and_ends_with_it(
    run: RunDir, watch: Callable[..., Terminal]
) -> None:
    terminal = watch()
    terminal.until("300/400")
    append(run, 350)
    with run.attempt(3).log.open("a") as f:
        f.write("3: here I am\n")
    text = terminal.until("350/400", "here I am")
    assert "loss 0.125" in text and "77 samples/s" in text
    facts = json.loads(run.attempt(3).facts.read_text())
    write_json(run.attempt(3).facts, facts | {"cause": "crashed", "ended": time.time()})
    assert terminal.left() == 1  # its outcome
    terminal.check_clean()
    last = terminal.raw.rpartition(b"\x1b[?1049l")[2].decode()
    assert "FAILED" in last and "350/400" in last and "q quits" not in last


def test_another_size(run: RunDir, watch: Callable[..., Terminal]) -> None:
    terminal = watch("--every", "3600")  # the signal brings the new picture, not the time
    terminal.until("q quits")
    terminal.resize(130, 30)
    text = terminal.until("0: step 300", holds=lambda text: "q quits" in text.splitlines()[0][100:])
    assert "4 ranks" in next(line for line in text.splitlines() if "3 attempts" in line)
    terminal.resize(70, 10)
    terminal.until("q quits", "3 attempts", holds=lambda text: "ranks" not in text)
    terminal.type(b"q")
    assert terminal.left() == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGQUIT, 131)],
)
def test_a_signal_leaves_the_terminal_clean(
    run: RunDir, watch: Callable[..., Terminal], number: signal.Signals, code: int
) -> None:
    terminal = watch()
    terminal.until("q quits")
    assert terminal.screen.cursor.hidden
    os.kill(terminal.process.pid, number)
    assert terminal.left() == code
    terminal.check_clean()


@pytest.mark.parametrize(
    ("keys", "code"),
    [(b"x\x1b[A\x03", 130), (b"\x1c", 131), (b"qq", 0), (b"\x1b[AxQ\n", 0)],
)
def test_keys(run: RunDir, watch: Callable[..., Terminal], keys: bytes, code: int) -> None:
    terminal = watch()
    terminal.until("q quits")
    terminal.type(keys)
    assert terminal.left() == code
    terminal.check_clean()
    assert "Traceback" not in terminal.text


def test_ctrl_z_gives_the_terminal_back_for_a_while(
    run: RunDir, watch: Callable[..., Terminal]
) -> None:
    shell = '"$@"; echo "in the shell"; read -r word; echo "$word"; fg >/dev/null'
    terminal = watch(shell=shell)
    terminal.until("q quits")
    terminal.type(b"\x1a")
    terminal.until("in the shell")
    terminal.check_clean()
    terminal.type(b"seen while typed\n")
    terminal.until("q quits", "0: step 300")
    terminal.type(b"q")
    assert terminal.left() == 0
    terminal.check_clean()


def test_slurm_is_asked_at_the_pace_of_the_profile(
    run: RunDir, watch: Callable[..., Terminal], tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    terminal = watch(ASKED=str(asked))
    terminal.until("02:54:00")
    for step in range(310, 350, 10):
        append(run, step)
        terminal.until(f"{step}/400")
    assert len(asked.read_text().split()) == 1  # it would be four at each look
    terminal.type(b"q")
    assert terminal.left() == 0


def test_why_it_waits(site: Site, watch: Callable[..., Terminal]) -> None:
    run = made_run(site.runs)
    shutil.rmtree(run.attempts)
    run.attempts.mkdir()
    run.log.unlink()
    site.slurm(squeue=RUNS.format(name=NAME).replace("RUNNING|None", "PENDING|Resources"))
    terminal = watch()
    text = terminal.until("waiting: Resources", "no attempt has started yet")
    assert "PENDING" in text.splitlines()[0]
    terminal.type(b"q")
    assert terminal.left() == 0


def test_one_of_each_is_counted_as_one(site: Site, command: Callable[..., Outcome]) -> None:
    single_run(site.runs)
    text = command("watch", "last", LC_ALL="C.UTF-8").out
    assert (
        "1 node x 1 GPU, " in text
        and "1 attempt, 0 steps lost" in text
        and "1 rank, 1 ended (.) " in text
    )


def test_a_program_without_steps_loses_none(site: Site, command: Callable[..., Outcome]) -> None:
    run = made_run(site.runs, ends=((0, 0, "preempted"),))
    for attempt in run.all_attempts():
        attempt.step.unlink()
        attempt.metrics.write_text("")
    text = command("watch", "last", LC_ALL="C.UTF-8").out
    assert "2 attempts" in text and "preempted  ran" in text
    assert "lost" not in text and "no steps" not in text


def test_a_slurm_that_hangs_holds_nobody(site: Site, watch: Callable[..., Terminal]) -> None:
    made_run(site.runs, cause=None, last=300)
    site.slurm(squeue="sleep 5")
    terminal = watch()
    terminal.until("300/400")
    began = time.monotonic()
    terminal.type(b"q")
    assert terminal.left() == 0
    assert time.monotonic() - began < 4


def test_nothing_of_a_run_is_obeyed(site: Site, watch: Callable[..., Terminal]) -> None:
    nasty = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m \x9b5m \u202ertl [bold]b[/bold] 数据 e\u0301"
    nasty += " :smile:"
    run = made_run(site.runs, "pets\x1b[2J\x1bc", cause=None, last=300)
    site.slurm(squeue=f"printf '17|PENDING|\\033[2Jwhy|||\\033]0;owned||{run.name}'")
    run.attempt(3).log.write_text(f"0: {nasty}\n0: the end\n")
    write_json(run.attempt(3).error, {"rank": 1, "host": nasty, "message": nasty})
    metrics = run.attempt(3).metrics
    metrics.write_text(metrics.read_text().replace('"n2"', json.dumps(nasty)))
    terminal = watch()
    text = terminal.until("why", "the end")
    assert "pets\\x1bc" in text and "[bold]b[/bold]" in text and ":smile:" in text
    assert "数" in text and "the end" in text
    terminal.type(b"q")
    assert terminal.left() == 0
    for bad in (
        b"owned\x07",
        b"\x1b]",
        b"\x1b[31mred",
        b"\x1bc",
        "\x9b".encode(),
        "\u202e".encode(),
    ):
        assert bad not in terminal.raw
    terminal.check_clean()
    assert terminal.screen.title == ""


def test_ascii_where_nothing_else_is_known(run: RunDir, watch: Callable[..., Terminal]) -> None:
    terminal = watch(LC_ALL="C", NO_COLOR="1")
    text = terminal.until("02:54:00", "0: step 300")
    assert text.isascii() and "####" in text and "':" in text and "- 3 attempts" in text
    assert b"\x1b[32m" not in terminal.raw and b"\x1b[1;32m" not in terminal.raw
    terminal.type(b"q")
    assert terminal.left() == 0


def test_a_terminal_that_cannot_be_drawn_on(run: RunDir, watch: Callable[..., Terminal]) -> None:
    terminal = watch(TERM="dumb")
    assert terminal.left() == 0
    assert b"\x1b" not in terminal.raw and b"4 ranks" in terminal.raw and terminal.raw.isascii()


def test_it_imports_no_framework(run: RunDir) -> None:
    packages = roots(imported(CALL, "watch", "last"))
    assert {"rich", "plotille"} <= packages
    assert not packages & {"torch", "numpy", "submitit", "jinja2"}


def test_once(run: RunDir, watch: Callable[..., Terminal]) -> None:
    terminal = watch("--once", COLUMNS="60", LINES="12")
    assert terminal.left() == 0
    assert b"\x1b[?1049h" not in terminal.raw and NAME in terminal.text
    lines = terminal.text.rstrip().splitlines()
    assert len(lines) <= 11 and max(map(len, lines)) <= 60


def test_a_pipe_gets_one_picture(run: RunDir, command: Callable[..., Outcome]) -> None:
    done = command("watch", "last", LC_ALL="C.UTF-8")
    assert done.code == 0 and done.err == ""
    assert "\x1b" not in done.out and "1 slow (S)" in done.out and "q quits" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert "▒" not in command("watch", "last", COLUMNS="40", LC_ALL="C.UTF-8").out


def test_slurm_that_does_not_answer(
    run: RunDir, site: Site, command: Callable[..., Outcome]
) -> None:
    site.slurm(squeue="echo no >&2; exit 1")
    done = command("watch", "last")
    assert done.code == 3 and "last known state" in done.out + done.err and "300/400" in done.out


def test_runs_that_are_no_good(site: Site, command: Callable[..., Outcome]) -> None:
    site.slurm()
    run = made_run(site.runs, cause=None, last=300)
    missing = command("watch", "nobody")
    assert missing.code == 2 and "no run 'nobody'" in missing.err
    run.attempt(3).facts.write_text("{")
    damaged = command("watch", "last")
    assert damaged.code == 2 and "is damaged" in damaged.err and damaged.out == ""
    run.job.write_text("[]")
    assert command("watch", "last").code == 2


def test_a_run_that_is_removed_meanwhile(run: RunDir, watch: Callable[..., Terminal]) -> None:
    terminal = watch()
    terminal.until("300/400")
    shutil.rmtree(run.path.rename(run.path.with_name("gone")))  # else it may be seen half there
    assert terminal.left() == 2
    terminal.check_clean()
    said = terminal.raw.rpartition(b"\x1b[?1049l")[2]
    said = re.sub(rb"\x1b\[\d*m", b"", said)
    assert said.startswith(b"error: ") and b"Traceback" not in terminal.raw


def test_a_real_run_to_its_end(site: Site, command: Callable[..., Outcome]) -> None:
    site.job("toy", "global_batch = 8\nmax_steps = 150\n", TOY)
    slowly = ("--set", "dataset.pause=0.01", "--set", "train.log_every=1")
    assert command("submit", "--gpus", "2", "--detach", *slowly).code == 0
    try:
        with Terminal("watch", "last", "--every", "0.2") as terminal:
            terminal.until("RUNNING", "/150", "loss", "samples/s", "2 ranks")
            assert terminal.left() == 0
            terminal.check_clean()
            last = terminal.raw.rpartition(b"\x1b[?1049l")[2].decode()
            assert "COMPLETED" in last and "150/150  100%" in last and "1  done" in last
    finally:
        end_all(site)
