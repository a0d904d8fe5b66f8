"""The page in a real browser, at the width of a telephone and of a desk."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import WIDTHS, Seen, browser, look
from conftest import record_run
from made import BEGAN, made_run
from playwright.sync_api import Error
from test_report import EVIL, looked

from hpcddp.report import page, shown
from hpcddp.rundir import RunDir, write_json

__all__ = ["browser", "look"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_is_drawn(tmp_path: Path, look: Callable[..., Seen], width: int) -> None:
    file = tmp_path / "run.html"
    file.write_text(page([looked(made_run(tmp_path))]))
    seen = look(width, color_scheme="dark" if width == WIDTHS[0] else "light")
    found = seen.open(file)
    found.locator(".chart canvas").first.wait_for()
    assert found.locator("h1").inner_text().startswith("pets-")
    assert "10 steps" in found.locator(".story").inner_text()
    assert found.locator(".chart").count() == 5
    assert seen.blank() == [] and seen.too_wide() == 0
    assert found.locator('.labels .slow[data-rank="2"]').is_visible()
    assert "Rank 2 on n2" in found.locator(".findings .slow").inner_text()
    assert found.locator(".bar .lost").count() == 1 and found.locator(".bar .start").count() == 3
    assert seen.requests == [file.as_uri()]  # and nothing else
    seen.clean()


def test_several_runs_lie_over_each_other(tmp_path: Path, look: Callable[..., Seen]) -> None:
    runs = [made_run(tmp_path, f"run-{i}", max_steps=400, lr=0.1 * i, ends=()) for i in range(3)]
    file = tmp_path / "runs.html"
    file.write_text(page(list(map(looked, runs))))
    for width in WIDTHS:
        seen = look(width)
        found = seen.open(file)
        found.locator(".chart canvas").first.wait_for()
        assert seen.blank() == [] and seen.too_wide() == 0
        keys = found.locator(".chart").first.locator(".keys button")
        assert [keys.nth(i).locator("span").inner_text() for i in range(3)] == [
            "run-0", "run-1", "run-2",
        ]  # fmt: skip
        assert found.locator("tr.differs th").all_inner_texts() == ["≠ lr"]
        seen.clean()


def test_a_run_without_attempts_has_a_page_too(tmp_path: Path, look: Callable[..., Seen]) -> None:
    run = RunDir(tmp_path / "young")
    run.create()
    record_run(run, spec={"name": "young"})
    file = tmp_path / "young.html"
    file.write_text(page([looked(run), looked(made_run(tmp_path, "old"))]))
    single = tmp_path / "single.html"
    single.write_text(page([looked(run)]))
    seen = look(WIDTHS[0])
    seen.open(file).locator(".chart canvas").first.wait_for()
    found = seen.open(single)
    assert found.locator(".chip").inner_text() == "rendered"
    assert found.locator(".story").inner_text().startswith("Has not begun.")
    assert found.locator("#curves .none").is_visible() and not found.locator("#ranks").is_visible()
    assert seen.too_wide() == 0
    seen.clean()


def test_html_from_a_run_is_shown_as_text(tmp_path: Path, look: Callable[..., Seen]) -> None:
    run = made_run(tmp_path, cause="crashed", last=300, slurm={"comment": EVIL})
    told = {"event": "eval", "attempt": 3, "time": BEGAN, "step": 300, "epoch": 3}
    with run.attempt(3).metrics.open("a") as f:
        f.write(json.dumps(told | {"metrics": {EVIL: 0.5}}) + "\n")
    run.attempt(3).log.write_text(f"0: {EVIL}\n")
    write_json(run.attempt(3).error, {"rank": 1, "host": EVIL, "type": "X", "message": EVIL})
    data = looked(run)
    data["status"]["run"] = data["ranks"][0]["host"] = data["script"] = EVIL
    file = tmp_path / "run.html"
    file.write_text(page([data, data | {"status": data["status"] | {"run": "second"}}]))
    seen = look(WIDTHS[0])
    found = seen.open(file)
    found.locator(".chart canvas").first.wait_for()
    for details in found.locator("details").all():
        details.evaluate("(node) => { node.open = true; }")
    assert found.evaluate("window.hacked") is None
    assert found.locator("img").count() == 0
    assert found.locator("script").count() == 4
    shows = found.locator("main").inner_text()
    assert shows.count("<script>window.hacked=1</script>") > 8
    assert seen.too_wide() == 0 and seen.requests == [file.as_uri()]
    seen.clean()
    # Even HTML that had come in would find nothing that it may do.
    found.evaluate("(html) => document.body.insertAdjacentHTML('beforeend', html)", BAIT)
    with pytest.raises(Error, match="Failed to fetch"):
        found.evaluate("fetch('http://127.0.0.1:9/')")
    assert len(seen.errors) >= 2 and all("Content Security Policy" in e for e in seen.errors)
    assert found.evaluate("window.hacked") is None


BAIT = "<img src=data:, onerror=window.hacked=2><iframe srcdoc='<p>'></iframe>"


def test_it_works_by_keyboard_and_is_drawn_again_in_place(
    tmp_path: Path, look: Callable[..., Seen]
) -> None:
    file = tmp_path / "run.html"
    early = looked(made_run(tmp_path, "early", cause=None, last=300))
    file.write_text(page([early]))
    seen = look()
    found = seen.open(file)
    chart = found.locator(".chart").first
    chart.locator("canvas").wait_for()
    chart.locator("button", has_text="log").focus()
    found.keyboard.press("Enter")
    assert chart.locator("button", has_text="log").get_attribute("aria-pressed") == "true"
    chart.locator(".plot").focus()
    for _ in range(3):
        found.keyboard.press("ArrowLeft")
    found.keyboard.press("+")
    assert chart.locator(".readout").inner_text() == "step 297"
    assert found.get_by_role("button", name="whole run").is_visible()
    found.locator(".heat canvas").focus()
    found.keyboard.press("ArrowDown")
    assert found.locator(".heat .readout").inner_text().startswith("rank 1 on n1")
    found.locator("summary", has_text="Newest figures").press("Enter")
    found.evaluate("scrollTo(0, 500)")

    late = looked(made_run(tmp_path, "late", cause=None, last=390))
    late["status"]["run"] = early["status"]["run"]
    found.evaluate("(data) => hpcddp.draw(document.getElementById('page'), data)", shown([late]))
    assert "step 390" in found.locator(".story").inner_text()
    assert chart.locator("button", has_text="log").get_attribute("aria-pressed") == "true"
    assert found.get_by_role("button", name="whole run").is_visible()  # still zoomed
    assert found.evaluate("scrollY") == 500
    assert found.locator(".figures details").get_attribute("open") is not None
    assert seen.blank() == []
    seen.clean()
