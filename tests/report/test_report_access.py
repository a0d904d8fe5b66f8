"""The page for readers with a keyboard, a screen reader, a dark screen, or little data."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import WIDTHS, Seen, browser, look
from made import made_run
from reported import (
    failed_run,
    looked,
    program_run,
    single_run,
    started_run,
    unsubmitted_run,
)

from hpcddp.report import page
from hpcddp.rundir import RunDir

__all__ = ["browser", "look"]

KINDS = (failed_run, unsubmitted_run, started_run, program_run, single_run)
OPEN = "for (const details of document.querySelectorAll('details')) details.open = true"
TIME = r"\d\d:\d\d:\d\d"


def drawn(folder: Path, *runs: RunDir) -> Path:
    """The page of these runs, in a file."""
    file = folder / "page.html"
    file.write_text(page(list(map(looked, runs))))
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_violation(
    tmp_path: Path, look: Callable[..., Seen], width: int, scheme: str
) -> None:
    runs = [kind(tmp_path) for kind in KINDS]
    seen = look(width, color_scheme=scheme)
    for shown in (
        [made_run(tmp_path, "live", cause=None, last=300)],
        *([run] for run in runs),
        runs,
    ):
        tab = seen.open(drawn(tmp_path, *shown))
        tab.locator("#curves .chart canvas, #curves .none").first.wait_for()
        for key in tab.locator(".keys button").all()[:1]:
            key.click()  # a hidden curve
        tab.evaluate(OPEN)
        assert seen.violations() == []
        assert seen.too_wide() == 0
    seen.clean()


def test_the_tab_key_stops_at_each_control_and_nowhere_else(
    tmp_path: Path, look: Callable[..., Seen]
) -> None:
    seen = look()
    tab = seen.open(drawn(tmp_path, failed_run(tmp_path)))
    tab.locator(".chart canvas").first.wait_for()
    stops = seen.stops()
    names = ["Curves", "Throughput", "Attempts", "Ranks", "Events", "Configuration"]
    assert stops[:7] == [f"a {name}" for name in (*names, "Log and script")]
    assert stops[7:9] == ["button log: loss", "button smooth: loss"]
    assert stops[9].startswith("slider loss. training: last 0.25")
    assert stops[10:12] == ["button training", "button evaluation"]
    assert [stop for stop in stops if stop.startswith("slider Map of the ranks")]
    assert "summary Attempt 3: error of rank 1 on n1" in stops
    assert "summary Last values of each rank" in stops
    assert stops[-2:] == ["summary Last lines of the log", "summary Batch script"]
    assert not [stop for stop in stops if "attempts" in stop]  # that table does not scroll here
    narrow = look(WIDTHS[0])
    narrow.open(tmp_path / "page.html").locator(".chart canvas").first.wait_for()
    assert "group attempts, scrollable" in narrow.stops()


def test_a_screen_reader_hears_the_values_under_the_cursor(
    tmp_path: Path, look: Callable[..., Seen]
) -> None:
    seen = look()
    tab = seen.open(drawn(tmp_path, failed_run(tmp_path)))
    chart = tab.get_by_role("slider", name="time per step, in seconds")
    chart.focus()
    tab.keyboard.press("ArrowLeft")
    assert chart.get_attribute("aria-valuetext") == (
        "step 299: whole step 500 ms, waiting for data 10 ms"
    )
    assert chart.get_attribute("aria-valuenow") == "299"
    tab.keyboard.press("+")
    reset = tab.get_by_role("button", name="reset zoom")
    assert reset.is_visible()
    tab.keyboard.press("Escape")
    assert not reset.is_visible()
    tab.keyboard.press("+")
    reset.press("Enter")
    assert not reset.is_visible() and tab.evaluate("document.activeElement.className") == "plot"
    ranks = tab.get_by_role("slider", name="Map of the ranks over steps 1 to")
    ranks.press("ArrowDown")
    assert str(ranks.get_attribute("aria-valuetext")).startswith("rank 1 on n1, step 297: 1.0")
    ranks.press("Escape")
    assert ranks.get_attribute("aria-valuetext") == "no cell chosen"
    for name in ("attempts", "events", "ranks"):
        if name == "ranks":
            tab.locator("summary", has_text="Last values").press("Enter")
        assert tab.get_by_role("table", name=name, exact=True).count() == 1
    assert tab.get_by_role("navigation", name="Sections").count() == 1
    for name in ("Curves", "Attempts", "Configuration"):
        assert tab.get_by_role("region", name=name, exact=True).count() == 1


@pytest.mark.parametrize(("zone", "name"), [("UTC", "UTC"), ("Europe/Berlin", "CEST")])
def test_all_times_have_the_readers_zone(
    tmp_path: Path, look: Callable[..., Seen], zone: str, name: str
) -> None:
    seen = look(timezone_id=zone)
    tab = seen.open(drawn(tmp_path, failed_run(tmp_path)))
    tab.locator(".chart canvas").first.wait_for()
    text = tab.locator("main").inner_text()
    assert len(re.findall(TIME, text)) > 10
    assert not re.findall(rf"{TIME}(?! {name})", text)


def test_little_data_is_said_in_words(tmp_path: Path, look: Callable[..., Seen]) -> None:
    seen = look()
    said = {}
    for kind in KINDS[1:]:
        tab = seen.open(drawn(tmp_path, kind(tmp_path)))
        tab.locator("h1").wait_for()
        none = tab.locator("#curves .none")
        words = none.inner_text() if none.count() else ""
        steps = tab.locator(".tile", has_text="steps").first.inner_text()
        story = tab.locator(".story").inner_text()
        said[kind] = (story.partition(":")[0], " ".join(steps.split("\n")), words)
        assert tab.locator("#curves .hint").is_visible() == (not words)
        assert "1 nodes" not in tab.locator("main").inner_text()
    assert said == {
        unsubmitted_run: (
            "Not submitted.", "steps – none recorded", "No metrics yet: the run has not started.",
        ),
        started_run: (
            "Started, no step recorded yet", "steps 0 of 400",
            "No metrics yet: they appear after the first recorded step.",
        ),
        program_run: (
            "Started, no step recorded yet", "steps – none recorded",
            "No metrics recorded. A program of your own records them with hpcddp.attach.",
        ),
        single_run: ("Completed all 40 steps", "steps 40 of 40", ""),
    }  # fmt: skip
    assert tab.locator(".facts").inner_text().split("\n")[2:4] == ["size", "1 node × 1 GPU"]
    assert not tab.locator(".heat").is_visible()  # one rank has no other beside it


def test_of_a_plain_program_no_lost_steps_are_claimed(
    tmp_path: Path, look: Callable[..., Seen]
) -> None:
    run = made_run(tmp_path, "program", command=["python", "train.py"])
    for attempt in run.all_attempts():
        for file in (attempt.metrics, attempt.step):
            file.unlink()
    tab = look().open(drawn(tmp_path, run))
    tab.locator("h1").wait_for()
    assert re.search(r"2 interruptions \(preempted\) cost \d", tab.locator(".story").inner_text())
    assert "0 step" not in tab.locator("main").inner_text()
