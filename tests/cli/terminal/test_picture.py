"""A run as lines of a terminal: what is on them, how wide they are, records of any kind."""

import json
from pathlib import Path

import pytest
from made import STEP_S, made_run
from rich.cells import cell_len
from written import append

from benchmarks.watch import make
from hpcddp.cli.terminal.grid import ranks
from hpcddp.cli.terminal.pen import Pen, span
from hpcddp.cli.terminal.picture import picture
from hpcddp.cli.terminal.shown import shown
from hpcddp.cli.watch import POINTS, viewer
from hpcddp.observe.view import RankView, View
from hpcddp.observe.viewer import Viewer
from hpcddp.rundir import RunDir, write_json

NAME = "pets-20261121-0253-a1b2"


def lines_of(run: RunDir, width: int, height: int, **more: bool) -> list[str]:
    """A picture as the text of its lines."""
    return plain_lines(viewer(run).look(), width, height, **more)


def plain_lines(view: View, width: int, height: int, **more: bool) -> list[str]:
    return [line.plain for line in picture(view, width, height, **more).renderables]


@pytest.mark.parametrize("width", [1, 2, 9, 10, 11, 20, 40, 79, 80, 119, 120, 160, 250])
@pytest.mark.parametrize("height", [1, 3, 10, 24, 50])
def test_no_line_is_wider_and_no_page_longer(tmp_path: Path, width: int, height: int) -> None:
    run = made_run(tmp_path, "long-" * 30, cause=None, last=300, ranks=64)
    run.attempt(3).log.write_text("".join(f"{i}: 数据\t{'數' * i}\n" for i in range(200)))
    for plain in (False, True):
        lines = lines_of(run, width, height, plain=plain)
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width
        assert not plain or all(line.isascii() for line in lines)
    if width * height > 200:
        assert "".join(lines)[:150] == "long-" * 30  # an id is not cut


def test_a_thousand_ranks(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause=None, last=300, ranks=1000, slow=777)
    write_json(run.attempt(3).error, {"rank": 5, "host": "n3", "message": "gone"})
    narrow, wide = lines_of(run, 80, 24), lines_of(run, 160, 50)
    title = next(
        i
        for i, line in enumerate(narrow)
        if "1000 ranks, 1 dead (X), 1 slow (S), 998 ok (.)" in line
    )
    assert narrow[title + 1].split()[:2] == ["5X", "777S"]  # the worst first
    shown_ = sum(len(line.split()) for line in narrow[title + 1 : title + 30] if ". " in line)
    assert any(line.endswith("not slow") for line in narrow) and shown_ < 1000
    assert "X rank 5 on n3: gone" in narrow
    text = "\n".join(wide)
    assert text.count(".") > 998 and "X" in text and "S" in text  # all of them


def test_forms_of_the_grid() -> None:
    def grid(count: int, rows: int, width: int = 80) -> list[str]:
        view = View(None, 0.0)  # type: ignore[arg-type]
        view.ranks = [RankView(r, r // 4, r % 4, f"host-{r // 4}", "cpu") for r in range(count)]
        for row in view.ranks[1:2]:
            row.state, row.note = "slow", "so slow"
        return [line.plain.rstrip() for line in ranks(Pen(False), view, width, rows)]

    assert grid(8, 4)[1:] == [
        "host-0  0. 1S 2. 3.",
        "host-1  4. 5. 6. 7.",
        "S rank 1 on host-0: so slow",
    ]
    assert grid(8, 3)[1] == "0. 1S 2. 3. 4. 5. 6. 7."
    assert grid(200, 6)[1] == "  0 .S........" + 6 * " .........."
    assert grid(5000, 4)[1].startswith("   1S    0.") and grid(5000, 4)[2].endswith("not slow")
    for count in (1, 2, 7, 100, 5000):
        for rows in range(2, 12):
            assert len(grid(count, rows)) <= rows


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "train", "step": 301, "loss": NaN, "step_s": Infinity, "samples_per_s": NaN}',
        '{"event": "train", "step": 301, "loss": 1e308, "time": 5}',
        '{"event": "train", "step": 301, "loss": -1e308}\n'
        '{"event": "train", "step": 302, "loss": 1e308}',
        '{"event": "train", "step": 301, "lo',
        '{"event": "slow", "step": 301}',
        '{"event": "slow", "step": 301, "rank": "x"}',
        '{"event": "ranks", "ranks": [{"rank": 0}]}',
        '{"event": "train", "step": "x", "loss": "y"}',
        '{"step": null}', "{}", "[1]", "null", "\x00\x00", '{"event": 7, "metrics": 3}',
        '{"event": "start", "total_steps": "many", "step": 3}',
        '{"event": "eval", "step": 301, "metrics": {"\\u001b[2J": NaN}}',
        '{"event": "eval", "metrics": [1]}', '{"event": "rollback", "to": "x"}',
        f'{{"event": "eval", "step": 301, "metrics": {{"a": {"9" * 400}}}}}',
        *(
            f'{{"event": "{event}", "step": {step}, "loss": 1, "total_steps": {step}}}'
            for event in ("train", "eval", "start", "end")
            for step in (2**63, -(2**63), "9" * 400, "true", "[1]", "1e999", "5.5")
        ),
        '{"event": "train", "step": 301, "loss": ' + "9" * 400 + "}",
        '{"event": "start", "time": "x", "step": 250}',
        '{"event": "start", "time": Infinity, "step": 250, "global_batch": [], "attempt": []}',
        '{"event": "ranks", "ranks": 5}', '{"event": "ranks", "ranks": [5, null]}',
        '{"event": "ranks", "ranks": [{"rank": "0", "node": 0, "local": 0, "host": 5}]}',
        '{"event": "ranks", "ranks": [{"rank": 0, "node": [], "local": 0, "host": ""}]}',
        '{"event": "end", "asked": "x", "time": 5, "by": 7}', '{"event": "end", "asked": 7}',
        '{"event": ["slow"], "rank": []}', '{"event": "slow", "rank": -1, "what": {}}',
        '{"event": "waiting", "hint": {}}', '{"step": 301, "gpu": 5, "busy_s": [], "wait_s": []}',
    ],
)  # fmt: skip
def test_metrics_of_any_kind(tmp_path: Path, line: str) -> None:
    run = made_run(tmp_path, cause=None, last=300)
    for path in (run.attempt(3).metrics, run.attempt(3).ranks):
        with path.open("a") as f:
            f.write(line if line.endswith("lo") else line + "\n")
    text = "\n".join(lines_of(run, 100, 30))
    assert NAME in text and "3 attempts" in text and "\x1b" not in text


def test_a_program_that_tells_nothing(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause=None, last=300)
    for attempt in run.all_attempts():
        for path in (attempt.metrics, attempt.ranks, attempt.step):
            path.unlink()
    text = "\n".join(lines_of(run, 80, 24))
    assert "3 attempts" in text and "0: step 300" in text and "loss" not in text


def test_what_is_new_alone_is_read(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause=None, last=300)
    eye = viewer(run)
    eye.look()
    metrics = run.attempt(3).metrics
    size = metrics.stat().st_size
    metrics.write_bytes(b" " * (size - 1) + b"\n")  # whoever reads it again finds nothing
    append(run, 301)
    view = eye.look()
    assert view.newest["loss"] == 0.125 and view.curves["loss"][0][-2:] == [300, 301]
    assert (
        view.useful_s
        == Viewer(made_run(tmp_path, "b", cause=None, last=300)).look().useful_s + STEP_S
    )


def test_a_long_run_is_shown_while_it_is_read(tmp_path: Path) -> None:
    """Of benchmarks/watch.py, which has a million lines and limits."""
    run = make(tmp_path, 60_000)
    eye = viewer(run)
    first = eye.look(seconds=0)
    assert first.behind and 0 < len(first.curves["loss"][0]) <= POINTS
    assert "60000/60000" in "\n".join(plain_lines(first, 80, 24))  # how far it is, is known at once
    for _ in range(50):
        view = eye.look(seconds=0)
        if not view.behind:
            break
    assert not view.behind and view.newest["loss"] == 1 / 60_000
    assert view.curves["loss"] == viewer(run).look().curves["loss"]
    assert view.useful_s == pytest.approx(600)


def test_advice_on_data(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause=None, last=300)
    record = {"event": "waiting", "step": 301, "share": 0.4, "hint": "raise data.workers"}
    with run.attempt(3).metrics.open("a") as f:
        f.write(json.dumps(record) + "\n")
    append(run, 301, wait_s=STEP_S / 2)
    assert "raise data.workers" in lines_of(run, 80, 24)
    append(run, 302, wait_s=0.001)
    assert "raise data.workers" not in lines_of(run, 80, 24)


def test_text_that_a_terminal_would_obey() -> None:
    assert shown("a\x1b[31;1mb\x1b[mc") == "abc"
    assert shown("\x1b]0;x\x07\r\b\x85\u202e\u2028") == "\\x1b]0;x\\x07\\r\\x08\\x85\\u202e\\u2028"
    assert shown("a\tb") == "a       b"
    assert shown("größe 数") == "größe 数"
    assert shown("größe 数", plain=True) == "gr\\xf6\\xdfe \\u6570"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1:00"), (3661, "1:01:01"), (90061, "1-01:01:01")],
)
def test_times(seconds: float, text: str) -> None:
    assert span(seconds) == text
