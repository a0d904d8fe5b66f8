"""The dashboard in a real browser, through a forwarded socket as `ssh -L` makes it, and by port."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import WIDTHS, Seen, browser, look
from dashboards import Dashboard, forwarded, started
from made import made_run

from hpcddp.rundir import RunDir, write_json

__all__ = ["browser", "look"]

Look = Callable[..., Seen]
Served = tuple[Dashboard, str, str]  # the process, its address, and what the token adds to that
EVIL = "<img src=x onerror=window.hacked=1>"
HIDE = """hidden => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
SCRIPT = "'\"><script>window.hacked=1<!-- &amp; \u202e x"


def folder_of_runs(path: Path) -> Path:
    """Runs of every kind, some of them hostile."""
    path.mkdir()
    made_run(path, "done-20261121-0253-a1b2")
    made_run(path, "works-20261122-1001-beef", cause=None, last=300)
    crashed = made_run(path, EVIL, cause="crashed", last=300)
    record = {"rank": 1, "host": EVIL, "type": "RuntimeError", "message": SCRIPT}
    write_json(crashed.attempt(3).error, record)
    crashed.attempt(3).log.write_text(f"0: {EVIL}\n1: {SCRIPT}\n")
    with crashed.attempt(3).metrics.open("a") as f:
        record = {"event": "eval", "attempt": 3, "time": 1.0, "step": 300, "epoch": 3}
        f.write(json.dumps(record | {"metrics": {SCRIPT: 0.5}}) + "\n")
    long = made_run(path, "a-name-without-end-" + "x" * 200, cause="preempted", last=300)
    damaged = made_run(path, f"damaged {SCRIPT}", ends=(), steps=20)
    damaged.job.write_text("{")
    os.utime(long.job, (1e9, 1e9))
    return path


@pytest.fixture(params=["socket", "port"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """A dashboard of such a folder, and the address that a person opens."""
    runs = folder_of_runs(tmp_path / "runs")
    if request.param == "port":
        with started("--runs", str(runs), "--port", "0") as made:
            yield made, f"http://127.0.0.1:{made.port}", f"#token={made.token}"
    else:
        with (
            started("--runs", str(runs), "--socket", str(tmp_path / "s")) as made,
            forwarded(made.path) as address,
        ):
            yield made, address, ""


@pytest.mark.parametrize("width", WIDTHS)
def test_all_runs_on_one_page(served: Served, look: Look, width: int, tmp_path: Path) -> None:
    _, address, token = served
    seen = look(width, color_scheme="dark" if width == WIDTHS[0] else "light")
    page = seen.open(f"{address}/{token}")
    page.locator("#answers.on").wait_for()
    assert page.url == f"{address}/"  # the token does not stay in sight
    assert page.locator("#folder").inner_text() == str(tmp_path / "runs")
    names = page.locator("#runs td.name a").all_inner_texts()
    assert len(names) == 5 and EVIL in names and f"damaged {SCRIPT}" in names
    assert names[-1].startswith("a-name-without-end-")  # the oldest
    works = page.locator("#runs tr", has_text="works-")
    assert works.locator(".chip").inner_text() == "RUNNING"
    assert works.locator(".steps").inner_text().split("\n") == ["300 / 400", "50 s to go"]
    box, done = (works.locator(s).bounding_box() for s in (".share", ".share i"))
    assert box and done and done["width"] == pytest.approx(0.75 * box["width"], abs=2)
    assert works.locator("td.warn").inner_text() == "1"
    assert f"RuntimeError: {SCRIPT}" in page.locator("#runs tr", has_text=EVIL).inner_text()
    assert seen.too_wide() == 0 and page.evaluate("window.hacked") is None
    assert all(asked.startswith(address) for asked in seen.requests)
    seen.clean()


@pytest.mark.parametrize("served", ["socket"], indirect=True)
def test_a_row_follows_its_run(served: Served, look: Look, tmp_path: Path) -> None:
    _, address, token = served
    seen = look()
    page = seen.open(f"{address}/{token}")
    row = page.locator("#runs tr", has_text="works-")
    row.locator(".steps", has_text="300 / 400").wait_for()
    handle = row.element_handle()
    grow(RunDir(tmp_path / "runs" / "works-20261122-1001-beef"), 320)
    row.locator(".steps", has_text="320 / 400").wait_for()
    assert row.locator("td[data-label=Loss]").inner_text() == "0.0625"
    assert handle and handle.evaluate("row => row.isConnected")  # the same row, not a new one
    made_run(tmp_path / "runs", "newest-1", ends=(), steps=20)
    page.locator("#runs td.name a", has_text="newest-1").wait_for()
    assert page.locator("#runs td.name a").first.inner_text() == "newest-1"
    seen.clean()


def grow(run: RunDir, last: int) -> None:
    """What a training writes when it goes on to a step."""
    for step in range(301, last + 1):
        record = {"event": "train", "attempt": 3, "time": 1790000275.0 + step / 2, "step": step}
        record |= {"epoch": 3, "loss": 0.0625, "samples_per_s": 60.0, "step_s": 0.5}
        with run.attempt(3).metrics.open("a") as f:
            f.write(json.dumps(record) + "\n")


@pytest.mark.parametrize("served", ["socket"], indirect=True)
def test_a_tab_that_is_not_seen_does_not_ask(served: Served, look: Look) -> None:
    _, address, _ = served
    seen = look()
    seen.page.clock.install()
    page = seen.open(f"{address}/")
    page.locator("#answers.on").wait_for()
    page.evaluate(HIDE, True)
    page.locator("#answers", has_text="paused").wait_for()
    asked = len(seen.requests)
    page.clock.run_for(60_000)
    assert len(seen.requests) == asked
    with page.expect_response("**/api/runs"):
        page.evaluate(HIDE, False)
    page.locator("#answers.on").wait_for()
    with page.expect_response("**/api/runs"):
        page.clock.run_for(2_000)


@pytest.mark.parametrize("served", ["socket"], indirect=True)
def test_runs_are_filtered_by_words_and_by_state(served: Served, look: Look) -> None:
    _, address, token = served
    page = look().open(f"{address}/{token}")
    page.locator("#answers.on").wait_for()
    names = page.locator("#runs tbody tr:not([hidden]) td.name a")
    assert names.count() == 5
    page.locator("#text").fill("17 WORK")
    assert names.all_inner_texts() == ["works-20261122-1001-beef"]
    page.locator("#text").fill("no such run")
    assert names.count() == 0 and page.locator("#empty").is_visible()
    page.locator("#text").fill("")
    page.locator("#states button", has_text="FAILED").click()
    assert names.all_inner_texts() == [EVIL]
    page.locator("#states button", has_text="all").click()
    assert names.count() == 5


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("served", ["port"], indirect=True)
def test_a_run_is_drawn_and_follows(served: Served, look: Look, width: int, tmp_path: Path) -> None:
    _, address, token = served
    seen = look(width)
    page = seen.open(f"{address}/{token}")
    page.locator("#runs a", has_text="works-").click()
    page.locator(".chart canvas").first.wait_for()
    assert page.title() == "works-20261122-1001-beef · hpcddp"
    assert seen.blank() == [] and seen.too_wide() == 0
    assert page.locator('.labels .slow[data-rank="2"]').is_visible()
    chart = page.locator(".chart canvas").first.element_handle()
    page.locator("nav a", has_text="Ranks").click()  # a place of the page is no token
    grow(RunDir(tmp_path / "runs" / "works-20261122-1001-beef"), 330)
    page.locator(".tile", has_text="330").first.wait_for()
    assert chart and chart.evaluate("canvas => canvas.isConnected")
    page.reload()
    page.locator(".tile", has_text="330").first.wait_for()
    page.locator(".back a").click()
    page.locator("#runs").wait_for()
    assert not seen.errors  # a question that the reader went away from has failed


@pytest.mark.parametrize("served", ["socket"], indirect=True)
def test_what_runs_wrote_is_shown_as_text(served: Served, look: Look) -> None:
    _, address, token = served
    seen = look()
    page = seen.open(f"{address}/{token}")
    page.locator("#runs a", has_text=EVIL).click()
    page.locator(".chart canvas").first.wait_for()
    assert page.locator("h1").inner_text().startswith(EVIL)
    assert SCRIPT in page.locator("#script").inner_text()
    assert page.locator("img").count() == 0 and page.evaluate("window.hacked") is None
    assert seen.too_wide() == 0
    seen.clean()


@pytest.mark.parametrize("served", ["socket"], indirect=True)
def test_a_damaged_run_and_one_that_is_gone_say_so(
    served: Served, look: Look, tmp_path: Path
) -> None:
    _, address, _ = served
    page = look().open(f"{address}/")
    page.locator("#runs a", has_text="damaged").click()
    page.locator(".alarm", has_text="job.json: is damaged").wait_for()
    run = tmp_path / "runs" / "done-20261121-0253-a1b2"
    page.goto(f"{address}/run/{run.name}")
    page.locator(".chart canvas").first.wait_for()
    run.rename(tmp_path / "gone")
    page.locator(".alarm", has_text="no such run in this folder").wait_for()
    assert page.locator(".chart canvas").count()  # what was drawn stays in sight


@pytest.mark.parametrize("served", ["port"], indirect=True)
def test_a_browser_without_the_token_sees_nothing(served: Served, look: Look) -> None:
    made, address, token = served
    page = look().open(f"{address}/")
    page.locator(".alarm", has_text="The access token is missing").wait_for()
    assert "works-" not in page.content()
    assert page.context.cookies() == []
    page.goto(f"{address}/{token}")  # as one pastes the whole address into the same tab
    page.locator("#runs a", has_text="works-").wait_for()
    assert not page.locator(".alarm").is_visible() and "token" not in page.url
    made.end()
    page.locator(".alarm", has_text="does not answer").wait_for()
    assert page.locator("#runs a", has_text="works-").is_visible()


@pytest.mark.parametrize("served", ["socket"], indirect=True)
def test_a_page_of_another_origin_learns_nothing(served: Served, look: Look) -> None:
    """Any page in the user's browser may try to ask what lies behind a port of this machine."""
    _, address, _ = served
    page = look().open(f"{address.replace('localhost', '127.0.0.1')}/")
    page.locator("#answers.on").wait_for()
    page.goto("data:text/html,<p>another page")
    tries = """async address => {
      const ask = async mode => {
        try { return (await fetch(`${address}/api/runs`, { mode })).type + " answer"; }
        catch { return "refused"; }
      };
      const frame = document.createElement("iframe");
      const loaded = new Promise((done) => { frame.onload = () => done(); });
      frame.src = address;
      document.body.append(frame);
      await loaded;
      let inside = "refused";
      try { inside = frame.contentDocument ? "read" : "refused"; } catch { /* as it should */ }
      return [await ask("cors"), inside];
    }"""
    assert page.evaluate(tries, address) == ["refused", "refused"]


def test_an_empty_folder_says_what_to_do(tmp_path: Path, look: Look) -> None:
    (tmp_path / "runs").mkdir()
    with started("--runs", str(tmp_path / "runs"), "--port", "0") as made:
        seen = look(WIDTHS[0])
        page = seen.open(f"http://127.0.0.1:{made.port}/#token={made.token}")
        page.locator("#empty", has_text="No runs in this folder yet").wait_for()
        assert not page.locator("#filter").is_visible() and seen.too_wide() == 0
        made_run(tmp_path / "runs", "first-1", ends=(), steps=20)
        page.locator("#runs a", has_text="first-1").wait_for()
        seen.clean()
