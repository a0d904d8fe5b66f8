"""The page as a file: valid, small, self-contained, and safe whatever the runs hold."""

import json
import math
import os
import re
import stat
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from import_hook import CALL, HEAVY, imported, roots
from made import made_run
from reported import EVIL, looked, many_attempts, spiky_run
from sites import Outcome, Site

from hpcddp.errors import UserError
from hpcddp.report import MARK, page, shown
from hpcddp.report.downsample import CODE, ROWS, SIZES
from hpcddp.report.page import LIMIT, asset, policy, script
from hpcddp.rundir import RunDir, write_json


def held(text: str) -> Any:
    """The data of a page; what JSON does not have is refused."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block
    return json.loads(block[1], parse_constant=refuse)


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def long_run(folder: Path, name: str, ranks: int = 64) -> RunDir:
    """A run with very much of everything."""
    run = made_run(
        folder, name, steps=2000, ranks=ranks, env={f"NAME_{i}": "x" * 999 for i in range(99)}
    )
    metrics = run.attempt(3).metrics
    record = {"event": "log", "attempt": 3, "time": 1e9, "epoch": 4}
    with metrics.open("a") as f:
        for step in range(400):
            values = {f"layer-{i}": math.sin(step * i) / 7 for i in range(60)}
            f.write(json.dumps(record | {"step": 2000 + step, "metrics": values}) + "\n")
    run.script.write_text("echo long\n" * 100_000)
    run.attempt(3).log.write_text("0: a line that goes on " * 10_000 + "\n" + "0: short\n" * 500)
    write_json(run.attempt(3).error, {"rank": 1, "host": "n1", "traceback": "x" * 100_000})
    return run


def test_the_page_holds_the_run(tmp_path: Path) -> None:
    text = page([looked(made_run(tmp_path))])
    (run,) = held(text)["runs"]
    assert run["status"]["state"] == "COMPLETED"
    assert [row["cause"] for row in run["attempts"]] == ["preempted", "preempted", "done"]
    steps, values = run["curves"]["loss"]
    assert (steps[0], steps[-1]) == (1, 400) and values[-1] == pytest.approx(0.12195, abs=1e-5)
    assert run["config"]["global_batch"] == "32" and run["versions"]["torch"] == "2.13.0"
    assert "srun" in run["script"] and run["log"][-1] == "0: step 400"
    slow = [row for row in run["ranks"]["rows"] if row["state"] == "slow"]
    assert [row["rank"] for row in slow] == [2] and run["ranks"]["slow"] == 1
    assert MARK in "\n".join(text.splitlines()[:10])


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    text = page([looked(made_run(tmp_path))])
    for tag, attributes in Elements(text).found:
        assert not [name for name in attributes if name in ("src", "srcset", "action", "style")]
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "link" or attributes["href"] == "data:,"
        assert tag not in ("iframe", "object", "embed", "img", "base", "form")
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|import\(|eval\(", text)
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text))
    assert addresses == {"https://github.com/leeoniya/uPlot"}  # in a comment


def test_the_policy_names_each_script_and_forbids_the_rest(tmp_path: Path) -> None:
    text = page([looked(made_run(tmp_path))])
    content = next(a for _, a in Elements(text).found if a.get("http-equiv"))["content"] or ""
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert len(scripts) == 3 and len(styles) == 1
    assert content == policy(tuple(scripts), tuple(styles))
    assert (
        "default-src 'none'" in content
        and "unsafe" not in content
        and "connect-src 'none'" in content
    )


def test_html_of_a_run_stays_in_its_block(tmp_path: Path) -> None:
    data = looked(made_run(tmp_path, cause="crashed", last=300))
    clean = page([data])
    data["status"]["run"] = data["script"] = data["attempts"][0]["cause"] = EVIL
    data["log"], data["events"] = [EVIL], [(1.0, 1, 1, EVIL)]
    data["config"], data["versions"] = {EVIL: EVIL}, {"torch": EVIL}
    data["curves"]["eval/" + EVIL] = ([1, 2], [0.5, 0.6])
    data["attempts"][2]["error"] = {"rank": 1, "host": EVIL, "message": EVIL}
    data["ranks"][0]["host"] = data["ranks"][0]["note"] = EVIL
    text = page([data])
    assert [tag for tag, _ in Elements(text).found] == [tag for tag, _ in Elements(clean).found]
    assert "<script>window" not in text and "<img" not in text
    assert "\u2028" not in text.partition('id="data"')[2]
    (run,) = held(text)["runs"]
    assert run["status"]["run"] == EVIL and run["log"] == [EVIL] and run["config"] == {EVIL: EVIL}


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    data = looked(made_run(tmp_path))
    data["curves"]["loss"] = ([1, 2, 3, 4], [1.0, math.nan, math.inf, 0.123456789])
    data["heat"][0][0], data["to_go_s"] = math.nan, math.inf
    data["log"] = ["a name of a file: \udcff"]
    data["attempts"][0]["lost"] = 2**63
    (run,) = held(page([data]))["runs"]
    assert run["curves"]["loss"][1] == [1, None, None, 0.12346]
    assert run["attempts"][0]["lost"] is None
    assert run["to_go_s"] is None and run["heat"]["rows"][0][0] == " "


def test_nan_in_a_long_curve_is_a_gap(tmp_path: Path) -> None:
    run = made_run(tmp_path, ends=(), steps=3000)
    lines = run.attempt(1).metrics.read_text().splitlines()
    changed = [
        re.sub(r'"loss": [^,]*', '"loss": NaN', line)
        if re.search(r'"step": 15\d\d,', line)
        else line
        for line in lines
    ]
    run.attempt(1).metrics.write_text("\n".join(changed) + "\n")
    (drawn,) = shown([looked(run)])["runs"]
    steps, values = drawn["curves"]["loss"]
    gone = [step for step, value in zip(steps, values, strict=True) if value is None]
    assert gone and all(1500 <= step < 1600 for step in gone)
    assert steps == sorted(steps)


def test_figures_are_those_of_all_points(tmp_path: Path) -> None:
    data = looked(spiky_run(tmp_path))
    for size in SIZES:
        (run,) = shown([data], size)["runs"]
        steps, values = run["curves"]["loss"]
        assert (steps[-1], values[-1]) == (3000, 1) and max(values) == 11
        assert run["newest"]["loss"] == 1 and run["newest"].keys() == run["curves"].keys()
        assert run["medians"] == {"samples_per_s": 64, "step_s": 0.5}
        steps, values = run["means"]["loss"]
        assert len(steps) == size.points // 2 and steps == sorted(steps)
        assert sum(values) / len(values) == pytest.approx(2.0, rel=0.05)
    data = looked(made_run(tmp_path, "short"))
    assert shown([data])["runs"][0]["means"] == {}
    small = shown([data], SIZES[-1])["runs"][0]["means"]  # of what is drawn with fewer points
    assert "loss" in small and "eval/accuracy" not in small


def test_totals_are_those_of_all_attempts(tmp_path: Path) -> None:
    data = looked(many_attempts(tmp_path))
    for size in SIZES:
        (run,) = shown([data], size)["runs"]
        assert len(run["attempts"]) == size.rows and run["earlier"] == 100 - size.rows
        assert run["interruptions"] == 99 and run["lost_steps"] == 990
        assert run["started_s"] == 1000 and run["lost_s"] == 495
        assert run["interrupted_s"] == 99 * (45 + 10 + 5)
        assert run["causes"] == ["crashed", "preempted"]


@pytest.mark.parametrize("count", [1, 4])
def test_it_stays_small_whatever_the_runs_hold(tmp_path: Path, count: int) -> None:
    one = looked(long_run(tmp_path, "long"))
    text = page([one | {"status": one["status"] | {"run": f"long-{i}"}} for i in range(count)])
    assert len(text.encode()) < LIMIT
    runs = held(text)["runs"]
    assert len(runs) == count
    for run in runs:
        assert len(run["curves"]["loss"][0]) >= 50 and len(run["curves"]) >= 8
        assert run["heat"]["rows"] and run["log"][-1] == "0: short" and run["config"]
        assert "more characters" in run["script"]


def test_a_dozen_runs_fit_too(tmp_path: Path) -> None:
    one = looked(long_run(tmp_path, "long", ranks=8))
    one["config"] = dict(list(one["config"].items())[:80])
    text = page([one | {"status": one["status"] | {"run": f"long-{i}"}} for i in range(12)])
    assert len(held(text)["runs"]) == 12
    assert len(text.encode()) < LIMIT


def test_long_texts_everywhere_fit_or_an_error_says_so(tmp_path: Path) -> None:
    data = looked(long_run(tmp_path, "long", ranks=300))
    for i, row in enumerate(data["ranks"]):
        row |= {"host": f"{i}<" * 2000, "device": "<" * 9000, "note": "<" * 9000, "state": "slow"}
    for name in ("hosts", "reason", "policy", "path", "nodes"):
        data["status"][name] = "<" * 100_000
    for row in data["attempts"]:
        row |= {"hosts": "<" * 9000, "reason": "<" * 9000, "cause": "<" * 9000}
    for name in ("config", "versions"):
        data[name] = {f"<{i}" * 500: "<" * 9000 for i in range(900)}
    data["script"], data["log"] = "<" * 100_000, ["<" * 900] * 200
    text = page([data])
    assert len(text.encode()) < LIMIT
    (run,) = held(text)["runs"]
    # A host for each row of the map, by its first rank.
    assert [rank for _, rank in run["hosts"]] == [
        i * run["heat"]["each"] for i in range(len(run["heat"]["rows"]))
    ]
    with pytest.raises(UserError, match="12 runs would be larger than 300 kB") as error:
        page([data] * 12)
    assert error.value.hint == "put fewer runs on one page"


def test_what_was_set_stays_where_a_configuration_is_long(tmp_path: Path) -> None:
    data = looked(made_run(tmp_path))
    data["config"] = {f"a{i}": i for i in range(500)} | {"set": "this", "z": 2}
    data["defaults"] = [f"a{i}" for i in range(500)]
    (run,) = shown([data])["runs"]
    assert run["config"]["set"] == "this" and run["config"]["..."] == "302 more values"
    assert len(run["config"]) == 201 and {*run["defaults"]} == {f"a{i}" for i in range(198)}


def test_a_thousand_ranks_become_rows_that_keep_the_worst(tmp_path: Path) -> None:
    data = looked(made_run(tmp_path, ranks=1000, slow=457, steps=40, ends=()))
    data["heat"] = [[3.0 if rank == 457 else 1.0] * 120 for rank in range(1000)]
    data["heat_steps"] = list(range(120))
    heat = shown([data])["runs"][0]["heat"]
    assert len(heat["rows"]) <= ROWS and heat["each"] == 4 and len(heat["steps"]) == 120
    worst = [i for i, row in enumerate(heat["rows"]) if CODE.index(row[5]) * heat["cell"] > 2]
    assert worst == [457 // 4]
    small = shown([data], SIZES[-1])["runs"][0]["heat"]
    assert sum(map(len, small["rows"])) <= 2 * SIZES[-1].cells
    assert len(page([data]).encode()) < LIMIT


def test_a_run_that_has_not_begun(site: Site, command: Callable[..., Outcome]) -> None:
    assert command("render", "toy").code == 0
    done = command("report", "toy", "-o", "-")
    assert done.code == 0, done.text
    (run,) = held(done.out)["runs"]
    assert run["status"]["state"] == "RENDERED" and run["attempts"] == [] and run["curves"] == {}


def test_the_command_names_its_file_after_the_run(
    site: Site, command: Callable[..., Outcome]
) -> None:
    run = made_run(Path("runs"))
    done = command("report", "pets")
    assert done.code == 0 and done.out == f"{run.name}.html\n", done.text
    first = Path(f"{run.name}.html").read_text()
    assert held(first)["runs"][0]["status"]["run"] == run.name
    assert command("report", "pets").code == 0  # an older report is replaced
    made_run(Path("runs"), "second")
    done = command("report", "pets", "second", "pets")
    assert done.out == "report.html\n"
    names = [r["status"]["run"] for r in held(Path("report.html").read_text())["runs"]]
    assert names == [run.name, "second"]


def test_only_its_owner_can_read_the_file(site: Site, command: Callable[..., Outcome]) -> None:
    made_run(Path("runs"), "mine")
    file = Path("mine.html")
    for _ in range(2):  # one that others could read is replaced too
        assert command("report", "mine").code == 0
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.chmod(0o644)


def test_names_that_are_no_text(site: Site, command: Callable[..., Outcome]) -> None:
    name = os.fsdecode(b"odd-\xff")
    made_run(Path("runs"), name)
    made_run(Path("runs"), "plain")
    done = command("report", name)
    assert done.code == 0, done.text
    assert "<title>odd-?</title>" in Path(f"{name}.html").read_text()
    for asked in ((name,), (name, "plain")):
        done = command("report", *asked, "-o", "-")
        assert done.code == 0 and held(done.out)["runs"][0]["status"]["run"] == name, done.text
    missing = command("report", name, "-o", f"{name}/x.html")
    assert missing.code == 2 and "cannot write the report" in missing.err, missing.text


def test_what_is_no_report_is_not_overwritten(site: Site, command: Callable[..., Outcome]) -> None:
    made_run(Path("runs"), "mine")
    thesis = site.write("thesis.html", "<h1>mine</h1>")
    done = command("report", "mine", "-o", "thesis.html")
    assert done.code == 2 and "--force" in done.err
    assert thesis.read_text() == "<h1>mine</h1>"
    assert command("report", "mine", "-o", "thesis.html", "--force").code == 0
    assert MARK in thesis.read_text()
    for place, word in (("runs", "a folder"), ("/dev/null", "not a regular file")):
        done = command("report", "mine", "--force", "-o", place)
        assert done.code == 2 and word in done.err


def test_the_command_is_light(site: Site) -> None:
    made_run(Path("runs"), "mine")
    assert not roots(imported(CALL, "report", "mine")) & (HEAVY | {"starlette"})


def test_errors_say_what_and_where(site: Site, command: Callable[..., Outcome]) -> None:
    made_run(Path("runs"), "mine")
    done = command("report", "nothing")
    assert done.code == 2 and "no run 'nothing'" in done.err
    done = command("report", "mine", "-o", "missing/x.html")
    assert done.code == 2 and "missing/x.html" in done.err and "-o" in done.err
    assert command("report").code == 2


def test_a_damaged_run_is_named_and_the_others_are_shown(
    site: Site, command: Callable[..., Outcome]
) -> None:
    made_run(Path("runs"), "whole")
    broken = made_run(Path("runs"), "broken")
    broken.attempt(2).facts.write_text("{")
    odd = made_run(Path("runs"), "odd")
    odd.attempt(3).metrics.write_text('{"event": "ranks", "ranks": [{"rank": []}]}\n')
    done = command("report", "whole", "broken", "odd", "-o", "-")
    assert done.code == 4 and "leaves out broken" in done.err
    assert "odd" not in done.err  # a record of another form is passed over
    assert [r["status"]["run"] for r in held(done.out)["runs"]] == ["whole", "odd"]
    done = command("report", "broken")
    assert done.code == 2 and "attempt.json" in done.err and "Traceback" not in done.text


def test_the_page_holds_nothing_that_it_does_not_show(tmp_path: Path) -> None:
    (run,) = held(page([looked(made_run(tmp_path))]))["runs"]
    parts = {r"runs?(?:\[0\])?": run, "status": run["status"], "attempt": run["attempts"][0]}
    for part, values in (parts | {"r(?:ow)?": run["ranks"]["rows"][0]}).items():
        used = {*re.findall(rf"\b{part}\.(\w+)", script())}
        # What stands in all runs is taken by its name: run[name].
        assert {*values} <= used | {"config", "versions", "script", "log"}, part


def test_our_scripts_never_make_html_of_text() -> None:
    for name in ("page.html.j2", "page.css"):
        assert asset(name)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|srcdoc",
        script(),
    )
