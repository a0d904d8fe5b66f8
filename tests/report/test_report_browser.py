"""The page in a real browser, at the width of a telephone and of a desk."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import WIDTHS, Seen, browser, look
from made import BEGAN, made_run
from playwright.sync_api import Error
from reported import EVIL, looked, many_attempts, spiky_run
from sites import record_run

from hpcddp.report import page, shown
from hpcddp.rundir import RunDir, write_json

__all__ = ["browser", "look"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_is_drawn(tmp_path: Path, look: Callable[..., Seen], width: int) -> None:
    file = tmp_path / "run.html"
    file.write_text(page([looked(made_run(tmp_path))]))
    seen = look(width, color_scheme="dark" if width == WIDTHS[0] else "light")
    tab = seen.open(file)
    tab.locator(".chart canvas").first.wait_for()
    assert tab.locator("h1").inner_text().startswith("pets-")
    assert "10 steps" in tab.locator(".story").inner_text()
    assert tab.locator(".chart").count() == 5
    assert seen.blank() == [] and seen.too_wide() == 0
    assert tab.locator('.labels .slow[data-rank="2"]').is_visible()
    assert "Rank 2 on n2" in tab.locator(".findings .slow").inner_text()
    assert tab.locator(".bar .lost").count() == 1 and tab.locator(".bar .start").count() == 3
    assert seen.requests == [file.as_uri()]  # and nothing else
    seen.clean()


def test_words_are_those_of_all_points_and_attempts(
    tmp_path: Path, look: Callable[..., Seen]
) -> None:
    spiky, torn = looked(spiky_run(tmp_path)), looked(many_attempts(tmp_path))
    seen, file = look(), tmp_path / "page.html"

    def tile(name: str) -> list[str]:
        """What a tile says, without its name."""
        element = seen.page.locator(".tile", has=seen.page.get_by_text(name, exact=True))
        lines: list[str] = element.inner_text().split("\n")[1:]
        return lines

    file.write_text(page([spiky]))
    tab = seen.open(file)
    tab.locator(".chart canvas").first.wait_for()
    assert tile("loss")[0] == "1" and tile("samples/s") == ["64", "median, 500 ms per step"]
    assert "training: last 1, lowest" in str(tab.locator(".plot").first.get_attribute("aria-label"))
    # What is drawn of the loss: its points, and the average over them.
    tab.evaluate(
        "() => { const join = uPlot.join; uPlot.join = (all) => { window.drawn = all; "
        "return join(all); }; }"
    )
    for _ in range(2):  # without it, and with it again
        tab.locator(".chart").first.get_by_text("smooth").click()
    (_, peaks), (_, smooth), *_ = tab.evaluate("drawn")
    assert max(peaks) == 11 and all(1.5 < value < 2.5 for value in smooth)

    file.write_text(page([torn]))
    tab = seen.open(file)
    story = tab.locator(".story").inner_text()
    cost = (990, "1 h 39 min")
    assert "100 attempts" in story
    assert "99 interruptions (crashed, preempted) cost {} steps and {}".format(*cost) in story
    assert tile("interruptions") == ["99", "{} steps, {}".format(*cost)]
    assert "starting 50 % 16 min 40 s" in tab.locator("#attempts .legend").last.inner_text()
    assert "36 earlier attempts" in tab.locator("#attempts").inner_text()
    rows = tab.locator("#attempts .scroll")  # a long table scrolls, and shows its end
    end = "(n) => [n.clientHeight, n.scrollHeight - n.scrollTop - n.clientHeight]"
    height, rest = rows.evaluate(end)
    assert height < 400 and rest < 2
    untold = torn | {"efficiency": None, "useful_s": 0.0}  # no step has said how long it took
    tab.evaluate("(data) => hpcddp.draw(document.getElementById('page'), data)", shown([untold]))
    assert tab.locator("#attempts h3").inner_text() == "Time on the nodes: 33 min 20 s"
    assert tab.locator("#attempts .stack").count() == 0 and tile("useful time")[0] == "–"

    file.write_text(page([torn, spiky | {"newest": spiky["newest"] | {"loss": math.nan}}]))
    tab = seen.open(file)
    rows = tab.locator("#top tbody tr")
    assert "990 steps" in rows.nth(0).inner_text()
    assert "not finite" in rows.nth(1).inner_text() and "64" in rows.nth(1).inner_text()
    seen.clean()


def test_several_runs_lie_over_each_other(tmp_path: Path, look: Callable[..., Seen]) -> None:
    runs = [made_run(tmp_path, f"run-{i}", max_steps=400, lr=0.1 * i, ends=()) for i in range(3)]
    file = tmp_path / "runs.html"
    file.write_text(page(list(map(looked, runs))))
    for width in WIDTHS:
        seen = look(width)
        tab = seen.open(file)
        tab.locator(".chart canvas").first.wait_for()
        assert seen.blank() == [] and seen.too_wide() == 0
        keys = tab.locator(".chart").first.locator(".keys button")
        assert [keys.nth(i).locator("span").first.inner_text() for i in range(3)] == [
            "run-0", "run-1", "run-2",
        ]  # fmt: skip
        assert tab.locator("tr.differs th").all_inner_texts() == ["≠ lr"]
        seen.clean()


def test_the_versions_that_matter_stand_first_and_no_name_runs_into_another(
    tmp_path: Path, look: Callable[..., Seen]
) -> None:
    """The others are folded away; long names are broken."""
    run, file = made_run(tmp_path), tmp_path / "page.html"
    others = {f"a-package-of-a-rather-long-name-{i}": f"{i}.0" for i in range(60)}
    first = {"python": "3.11.7", "executable": "/opt/x/bin/python"}
    write_json(run.versions, {**first, "packages": {**others, "torch": "2.13.0", "numpy": "2.3",
                                                    "hpcddp": "0.1"}})  # fmt: skip
    file.write_text(page([looked(run)]))
    for width in WIDTHS:
        tab = (seen := look(width)).open(file)
        rows = tab.locator(".versions > .columns th")
        assert rows.all_inner_texts() == ["python", "torch", "numpy", "hpcddp", "executable"]
        tab.get_by_text("60 more packages").click()
        names = tab.locator(".versions th")
        assert names.last.inner_text().endswith("-name-9") and names.last.is_visible()
        assert seen.too_wide() == 0
        wide = "(all) => all.filter((th) => th.scrollWidth > th.clientWidth).length"
        assert width == min(WIDTHS) or names.evaluate_all(wide) == 0


def test_only_ends_that_a_rank_has_caused_are_marked_as_bad(
    tmp_path: Path, look: Callable[..., Seen]
) -> None:
    ends = ((120, 120, "time limit"), (260, 250, "crashed"), (300, 300, "preempted"))
    file = tmp_path / "ends.html"
    file.write_text(page([looked(made_run(tmp_path, ends=ends, cause="hang"))]))
    tab = (seen := look(WIDTHS[1])).open(file)
    assert tab.locator(".causes .bad").all_inner_texts() == ["2 crashed", "4 hang"]
    assert tab.locator("#attempts td.bad").all_inner_texts() == ["crashed", "hang"]
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
    tab = seen.open(single)
    assert tab.locator(".chip").inner_text() == "RENDERED"
    assert tab.locator(".story").inner_text().startswith("Not submitted.")
    assert tab.locator("#curves .none").inner_text() == "No metrics yet: the run has not started."
    assert tab.locator("nav a:visible").all_inner_texts() == [
        "Curves", "Attempts", "Events", "Configuration",
    ]  # fmt: skip
    assert tab.locator("#curves .none").is_visible() and not tab.locator("#ranks").is_visible()
    assert seen.too_wide() == 0
    seen.clean()


def test_html_from_a_run_is_shown_as_text(tmp_path: Path, look: Callable[..., Seen]) -> None:
    run = made_run(tmp_path, cause="crashed", last=300, slurm={"comment": EVIL})
    record = {"event": "eval", "attempt": 3, "time": BEGAN, "step": 300, "epoch": 3}
    with run.attempt(3).metrics.open("a") as f:
        f.write(json.dumps(record | {"metrics": {EVIL: 0.5}}) + "\n")
    run.attempt(3).log.write_text(f"0: {EVIL}\n")
    write_json(run.attempt(3).error, {"rank": 1, "host": EVIL, "type": "X", "message": EVIL})
    data = looked(run)
    data["status"]["run"] = data["ranks"][0]["host"] = data["script"] = EVIL
    file = tmp_path / "run.html"
    file.write_text(page([data, data | {"status": data["status"] | {"run": "second"}}]))
    seen = look(WIDTHS[0])
    tab = seen.open(file)
    tab.locator(".chart canvas").first.wait_for()
    for details in tab.locator("details").all():
        details.evaluate("(node) => { node.open = true; }")
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("img").count() == 0
    assert tab.locator("script").count() == 4
    shows = tab.locator("main").inner_text()
    assert shows.count("<script>window.hacked=1</script>") > 8
    assert seen.too_wide() == 0 and seen.requests == [file.as_uri()]
    seen.clean()
    # Even HTML that had come in would find nothing that it may do.
    tab.evaluate("(html) => document.body.insertAdjacentHTML('beforeend', html)", BAIT)
    with pytest.raises(Error, match="Failed to fetch"):
        tab.evaluate("fetch('http://127.0.0.1:9/')")
    assert len(seen.errors) >= 2 and all("Content Security Policy" in e for e in seen.errors)
    assert tab.evaluate("window.hacked") is None


BAIT = "<img src=data:, onerror=window.hacked=2><iframe srcdoc='<p>'></iframe>"


def test_it_works_by_keyboard_and_is_drawn_again_in_place(
    tmp_path: Path, look: Callable[..., Seen]
) -> None:
    file = tmp_path / "run.html"
    early = looked(made_run(tmp_path, "early", cause=None, last=300))
    file.write_text(page([early]))
    seen = look()
    tab = seen.open(file)
    chart = tab.locator(".chart").first
    chart.locator("canvas").wait_for()
    chart.locator("button", has_text="log").focus()
    tab.keyboard.press("Enter")
    assert chart.locator("button", has_text="log").get_attribute("aria-pressed") == "true"
    chart.locator(".plot").focus()
    for _ in range(3):
        tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("+")
    assert chart.locator(".readout").inner_text() == "step 297"
    assert tab.get_by_role("button", name="reset zoom").is_visible()
    tab.locator(".heat canvas").focus()
    tab.keyboard.press("ArrowDown")
    assert tab.locator(".heat .readout").inner_text().startswith("rank 1 on n1")
    tab.locator("summary", has_text="Last values").press("Enter")
    tab.evaluate("scrollTo(0, 500)")

    late = looked(made_run(tmp_path, "late", cause=None, last=390))
    late["status"]["run"] = early["status"]["run"]
    tab.evaluate("(data) => hpcddp.draw(document.getElementById('page'), data)", shown([late]))
    assert "step 390" in tab.locator(".story").inner_text()
    assert chart.locator("button", has_text="log").get_attribute("aria-pressed") == "true"
    assert tab.get_by_role("button", name="reset zoom").is_visible()  # still zoomed
    assert tab.evaluate("scrollY") == 500
    assert tab.locator(".figures details").get_attribute("open") is not None
    assert seen.blank() == []
    homeless = early | {"ranks": []}  # where its ranks are is not told
    tab.evaluate("(data) => hpcddp.draw(document.getElementById('page'), data)", shown([homeless]))
    assert tab.locator(".labels span").all_inner_texts() == ["2 ◂", "0", "1", "3"]
    seen.clean()
