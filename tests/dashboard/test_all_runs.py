"""What the dashboard tells of a folder, and how often it looks for that."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from made import BEGAN, made_run
from sites import Site

from hpcddp.attempt import ledger
from hpcddp.dashboard import all_runs as folder_
from hpcddp.dashboard import answers
from hpcddp.dashboard.all_runs import IDLE, Folder, scan
from hpcddp.dashboard.answers import Answer
from hpcddp.errors import UserError
from hpcddp.observe import viewer
from hpcddp.rundir import RunDir, write_json


def rows_of(folder: Folder) -> dict[str, dict[str, object]]:
    """The rows of a new look."""
    folder._all._due = 0.0
    return {row["run"]: row for row in json.loads(folder.runs().body)["runs"]}


def test_a_run_that_has_ended_is_read_once(tmp_path: Path) -> None:
    run = made_run(tmp_path, "done-1", ends=(), steps=20, slow=None)
    folder = Folder(tmp_path)
    first = rows_of(folder)["done-1"]
    run.attempt(1).metrics.write_text("")
    assert rows_of(folder)["done-1"] == first and first["loss"]
    facts = ledger.read(run.attempt(1))
    assert facts
    facts.cause = "crashed"
    write_json(run.attempt(1).facts, vars(facts))
    assert rows_of(folder)["done-1"]["state"] == "FAILED"


def test_a_run_comes_grows_and_goes(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert rows_of(folder) == {}
    run = made_run(tmp_path, "works-1", ends=(), steps=400, last=100, cause=None, slow=None)
    assert rows_of(folder)["works-1"]["step"] == 100
    assert json.loads(folder.run("works-1").body)["runs"][0]["status"]["step"] == 100
    for record in ({"event": "train", "step": 101, "time": 1790000100.0, "loss": float("nan")},
                   {"event": "slow", "step": 101, "rank": 1}):  # fmt: skip
        with run.attempt(1).metrics.open("a") as f:
            f.write(json.dumps(record) + "\n")
    row = rows_of(folder)["works-1"]
    assert (row["step"], row["loss"], row["slow"]) == (101, None, 1)
    shutil.rmtree(run.path)
    with pytest.raises(UserError, match="no such run"):
        folder.run("works-1")
    assert rows_of(folder) == {}


def test_a_rank_is_slow_until_its_work_and_its_data_have_recovered(tmp_path: Path) -> None:
    run = made_run(tmp_path, "works-1", ends=(), last=100, cause=None, slow=None)
    folder, slow = Folder(tmp_path), []
    marks = [("slow", "compute", 1), ("slow", "data", 1), ("slow", "data", 2),
             ("recovered", "data", 1), ("recovered", "compute", 1)]  # fmt: skip
    for event, what, rank in marks:
        with run.attempt(1).metrics.open("a") as f:
            f.write(json.dumps({"event": event, "step": 101, "what": what, "rank": rank}) + "\n")
        slow.append(rows_of(folder)["works-1"]["slow"])
    assert slow == [1, 1, 2, 2, 1]


def test_what_is_in_one_folder_does_not_hide_the_others(tmp_path: Path) -> None:
    made_run(tmp_path, "good", ends=(), steps=20)
    for name, text in {
        "words": '{"event": "train", "step": "many", "loss": {"a": 1}}\n',
        "deep": "[" * 100_000 + "\n",
        "lone": '{"event": "train", "step": 1, "loss": "\\ud800"}\n',
    }.items():
        run = made_run(tmp_path, name, ends=(), steps=20)
        run.attempt(1).metrics.write_text(text)
    bytes_ = RunDir(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    shutil.copytree(tmp_path / "good", bytes_.path, symlinks=True)
    rows = rows_of(Folder(tmp_path))
    assert set(rows) == {"good", "words", "deep", "lone", "\ufffd\ufffd"}
    assert rows["good"]["state"] == "COMPLETED" and rows["words"]["state"] == "DAMAGED"


def page(folder: Folder, name: str) -> Answer:
    """The answer of a new look."""
    folder.run(name)
    for page in folder._pages.values():
        page._due = 0.0
    return folder.run(name)


def test_the_page_of_an_ended_run_is_made_once(tmp_path: Path) -> None:
    run = made_run(tmp_path, "done-1", ends=(), steps=20, slow=None)
    folder = Folder(tmp_path)
    first = page(folder, "done-1")
    assert page(folder, "done-1") is first
    facts = ledger.read(run.attempt(1))
    assert facts
    facts.cause = "crashed"
    write_json(run.attempt(1).facts, vars(facts))
    (again,) = json.loads(page(folder, "done-1").body)["runs"]
    assert again["status"]["state"] == "FAILED" and again["curves"]["loss"]


def test_a_page_is_not_sent_again_for_the_time_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.runs.mkdir()
    run = made_run(site.runs, "works-1", ends=(), last=100, cause=None, slow=None)
    folder, now, tags = Folder(site.runs), BEGAN - BEGAN % 60 + 600, list[str]()
    while not rows_of(folder)["works-1"]["stale"]:  # there is no Slurm here
        time.sleep(0.02)
    for seconds in (0, 2, 60):
        monkeypatch.setattr(viewer.time, "time", lambda moved=now + seconds: moved)
        tags.append(page(folder, "works-1").tag)
    with run.attempt(1).metrics.open("a") as f:
        f.write('{"event": "train", "step": 101, "time": 1790000100.0, "loss": 1.0}\n')
    tags.append(page(folder, "works-1").tag)
    assert tags[0] == tags[1] and len(set(tags)) == 3


def test_what_nobody_looks_at_is_not_held(tmp_path: Path) -> None:
    for name in "ab":
        made_run(tmp_path, name, ends=(), steps=20)
    folder = Folder(tmp_path)
    folder.run("a")
    folder.run("b")
    for page in folder._pages.values():
        page.asked -= IDLE + 1
    folder.run("b")
    folder.forget()
    assert {name for name, _ in folder._pages} == {"b"}
    assert json.loads(folder.run("a").body)["runs"][0]["curves"]["loss"]


def test_links_that_lead_out_are_not_shown(tmp_path: Path) -> None:
    runs, other = tmp_path / "runs", tmp_path / "other"
    for folder in (runs, other):
        folder.mkdir()
        made_run(folder, "a", ends=(), steps=20)
    (runs / "out").symlink_to(other / "a")
    (runs / "in").symlink_to("a")
    (runs / "loop").symlink_to("loop")
    inside, outside = scan(runs)
    assert ({run.name for run in inside}, outside) == ({"a", "in"}, 1)
    (tmp_path / "linked").symlink_to(runs)  # the folder itself may be a link
    assert len(scan(tmp_path / "linked")[0]) == 2


def test_slurm_is_asked_once_for_all_runs(site: Site) -> None:
    site.runs.mkdir()
    for name in ("a-1", "b-1", "c-1"):
        made_run(site.runs, name, ends=(), steps=20, last=10, cause=None)
    row = "echo '17|SUSPENDED|Priority|2030-01-01T10:00:00|x|n7||a-1'"
    site.slurm(squeue=f"echo asked >> {site.folder}/asked; {row}")
    folder = Folder(site.runs)
    assert rows_of(folder)["a-1"]["state"] == "RUNNING"  # by its folder: Slurm has not answered yet
    until = time.monotonic() + 60
    while rows_of(folder)["a-1"]["state"] == "RUNNING" and time.monotonic() < until:
        time.sleep(0.02)
    rows = rows_of(folder)
    assert (rows["a-1"]["state"], rows["a-1"]["reason"]) == ("SUSPENDED", "Priority")
    assert rows["b-1"]["state"] == "LOST"
    for _ in range(5):
        rows_of(folder)
    assert (site.folder / "asked").read_text() == "asked\n"
    # What its folder says later is newer than Slurm's word.
    ledger.end(RunDir(site.runs / "a-1"), 1, 0, "done")
    assert rows_of(folder)["a-1"]["state"] == "COMPLETED"
    ledger.begin(
        RunDir(site.runs / "b-1"), ledger.new_attempt("17", 1, slurm=True), lambda a: False
    )
    row = rows_of(folder)["b-1"]
    assert (row["state"], row["attempt"]) == ("RUNNING", 2)


def test_a_slurm_that_is_gone_hides_nothing(site: Site) -> None:
    site.runs.mkdir()
    made_run(site.runs, "a-1", ends=(), steps=20, last=10, cause=None)
    site.slurm(squeue="echo 'squeue: error: Unable to contact slurm' >&2; exit 1")
    folder = Folder(site.runs)
    until = time.monotonic() + 60
    while not (row := rows_of(folder)["a-1"])["stale"] and time.monotonic() < until:
        time.sleep(0.02)
    assert (row["state"], row["stale"], row["step"], row["reason"]) == ("RUNNING", True, 10, "")
    assert "Unable to contact" in json.loads(folder.runs().body)["away"]


def test_many_tabs_are_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "EVERY", 60.0)
    made_run(tmp_path, "done-1", ends=(), steps=20)
    folder = Folder(tmp_path)
    assert folder.runs() is folder.runs()
    assert folder.run("done-1") is folder.run("done-1")


def test_the_curves_of_few_runs_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        made_run(tmp_path, name, ends=(), steps=20)
    monkeypatch.setattr(folder_, "VIEWERS", 2)
    folder = Folder(tmp_path)
    first = folder.run("a")
    assert folder.run("b") and folder.run("a") is first  # b was not asked for as long
    assert folder.run("c") and folder.run("a") is first
    assert {name for name, _ in folder._pages} == {"a", "c"}
