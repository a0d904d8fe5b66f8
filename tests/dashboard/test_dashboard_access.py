"""The dashboard for readers with a keyboard, a screen reader, or a dark screen."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import WIDTHS, Seen, browser, look
from dashboards import Dashboard, started
from made import made_run
from reported import failed_run, single_run, unsubmitted_run

__all__ = ["browser", "look"]

Look = Callable[..., Seen]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Dashboard]:
    runs = tmp_path / "runs"
    runs.mkdir()
    for kind in (failed_run, single_run, unsubmitted_run):
        kind(runs)
    made_run(runs, "live", cause=None, last=300)
    made_run(runs, "damaged", ends=(), steps=20).job.write_text("{")
    with started("--runs", str(runs), "--port", "0") as made:
        yield made


def address(made: Dashboard, path: str = "") -> str:
    return f"http://127.0.0.1:{made.port}/{path}#token={made.token}"


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(WIDTHS[0], "dark"), (WIDTHS[-1], "light"),
     *(pytest.param(width, scheme, marks=pytest.mark.full)
       for width, scheme in ((WIDTHS[0], "light"), (WIDTHS[-1], "dark")))],
)  # fmt: skip
def test_axe_finds_no_violation(served: Dashboard, look: Look, width: int, scheme: str) -> None:
    seen = look(width, color_scheme=scheme)
    page = seen.open(address(served))
    page.locator("#answers.on").wait_for()
    assert seen.violations() == []
    page.locator("#states button", has_text="FAILED").click()
    assert seen.violations() == []
    page.locator("#text").fill("no such run")
    assert seen.violations() == []
    page.goto(address(served, "run/live"))
    page.locator(".chart canvas").first.wait_for()
    page.locator("#answers.on").wait_for()
    assert seen.violations() == []
    seen.clean()
    page.goto(address(served, "run/damaged"))
    page.locator("#answers.off").wait_for()
    assert seen.violations() == [] and page.locator("h1").inner_text() == "damaged"


def test_the_keyboard_reaches_all_of_it(served: Dashboard, look: Look) -> None:
    seen = look()
    page = seen.open(address(served))
    page.locator("#answers.on").wait_for()
    stops = seen.stops()
    assert stops[:2] == ["input Filter the runs by text", "button all 5"]
    buttons = [stop for stop in stops if stop.startswith("button ")]
    links = [stop for stop in stops if stop.startswith("a ")]
    assert stops == [stops[0], *buttons, *links] and len(links) == 5
    page.locator("#text").fill("fail")
    rows = page.locator("#runs tbody tr:not([hidden])")
    status = page.get_by_role("status").filter(has_text="1 of 5 runs shown")
    assert rows.count() == 1 and status.count() == 1
    page.locator("#text").press("Escape")
    assert rows.count() == 5 and page.locator("#text").input_value() == ""
    page.locator("#states button", has_text="RUNNING").press("Enter")
    assert rows.count() == 1
    page.keyboard.press("Escape")
    assert rows.count() == 5


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_is_a_table_at_any_width(served: Dashboard, look: Look, width: int) -> None:
    page = look(width, timezone_id="Europe/Berlin").open(address(served))
    page.locator("#answers.on").wait_for()
    table = page.get_by_role("table", name="Runs")
    assert table.get_by_role("columnheader").all_inner_texts() == [
        "Run", "State", "Progress", "Loss", "Samples/s", "Nodes × GPUs", "Attempts", "Slow ranks",
    ]  # fmt: skip
    row = table.get_by_role("row").filter(has=page.get_by_role("link", name="single"))
    assert row.get_by_role("rowheader").inner_text() == "single"
    assert re.search(r"2026-09-21 16:13:50 CEST", row.inner_text())
    assert row.locator("td[data-label^=Nodes]").get_attribute("title") == "1 node × 1 GPU: n[1-2]"
    bar = row.get_by_role("progressbar")
    assert bar.get_attribute("aria-valuetext") == "step 40 of 40"
