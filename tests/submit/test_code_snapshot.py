"""A command works on the code as it was when it was submitted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import Command
from repositories import GIT, repository
from sites import Site

from hpcddp import versions
from hpcddp.planning import code_files
from hpcddp.rundir import RunDir
from hpcddp.submit import code_snapshot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path)


def freeze(root: Path, folder: Path, runs: Path, name: str = "a") -> Path:
    made = runs / name
    made.mkdir(parents=True)
    code_snapshot.copy(code_files.find(folder, runs), runs, made / "work")
    return made / "work"


def test_code_is_copied_and_what_git_ignores_is_linked(root: Path, tmp_path: Path) -> None:
    code = code_files.find(root / "sub", tmp_path / "runs")
    assert sorted(code.files) == [".gitignore", "pkg/code.py", "sub/run.sh"]
    assert code.links == {
        "data": str(root / "data"), "sub/old.log": str(root / "sub/old.log"),
        "in": "pkg/code.py", "out": str(tmp_path / "outside"), "far": str(tmp_path),
    }  # fmt: skip
    work = freeze(root, root / "sub", tmp_path / "runs")
    assert (work / "in").read_text() == "VALUE = 1\n"
    assert (work / "data/deep/big").stat().st_size == 1000
    assert os.access(work / "sub/run.sh", os.X_OK)
    assert not (work / "out").is_file() or (work / "out").is_symlink()


def test_later_changes_do_not_reach_it_and_contents_are_stored_once(
    root: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    first = freeze(root, root, runs, "a")
    (root / "sub/run.sh").write_text("#!/bin/bash\n")
    second = freeze(root, root, runs, "b")
    assert (first / "sub/run.sh").read_text() == "#!/bin/sh\n"
    assert (second / "sub/run.sh").read_text() == "#!/bin/bash\n"
    assert (first / "pkg/code.py").samefile(second / "pkg/code.py")
    assert not (first / "pkg/code.py").stat().st_mode & 0o222
    stored = [p for p in (runs / code_snapshot.STORE).rglob("*") if p.is_file()]
    assert len(stored) == 4
    (first / "pkg/code.py").unlink()  # a folder of the run's own
    (first / "pkg/code.py").write_text("VALUE = 2\n")
    assert (second / "pkg/code.py").read_text() == "VALUE = 1\n"


def test_a_submodule_that_was_not_fetched_is_an_empty_folder(root: Path, tmp_path: Path) -> None:
    link = f"160000,{'1' * 40},lib/inner"
    subprocess.run(
        [*GIT, "-C", str(root), "update-index", "--add", "--cacheinfo", link], check=True
    )
    (root / "lib/inner").mkdir(parents=True)
    assert not list((freeze(root, root, tmp_path / "runs") / "lib/inner").iterdir())


def test_a_folder_of_ignored_files_is_one_link_and_caches_are_none(
    root: Path, tmp_path: Path
) -> None:
    for folder in ("logs/deep", "pkg/__pycache__"):
        (root / folder).mkdir(parents=True)
    for path in ("logs/a.log", "logs/deep/b.log", "pkg/__pycache__/code.pyc"):
        (root / path).write_text("x")
    with (root / ".gitignore").open("a") as ignored:
        ignored.write("__pycache__/\n")
    code = code_files.find(root, tmp_path / "runs")
    assert {p: t for p, t in code.links.items() if p.startswith(("logs", "pkg"))} == {
        "logs": str(root / "logs")
    }
    work = freeze(root, root, tmp_path / "runs")
    assert (work / "logs/deep/b.log").read_text() == "x"
    assert not (work / "pkg/__pycache__").exists()


def test_what_cannot_be_copied_leaves_no_run(site: Site, command: Command) -> None:
    site.write("train.py", "")
    (site.runs / ".code").parent.mkdir(exist_ok=True)
    (site.runs / ".code").write_text("in the way")
    done = command("submit", "--", sys.executable, "train.py")
    assert done.code == 2 and "cannot copy the code" in done.err
    assert not list(site.runs.glob("train-*"))


def test_empty_folders_are_made_and_folders_for_outputs_are_linked(
    root: Path, tmp_path: Path
) -> None:
    (root / "checkpoints/old").mkdir(parents=True)
    (root / "results").mkdir()
    (root / "results/.gitkeep").write_text("")
    (root / "logs").mkdir()
    (root / "logs/.gitkeep").write_text("")
    (root / "logs/a.txt").write_text("")
    (root / ".gitignore").write_text(
        "data/\nresults/*\n!results/.gitkeep\nlogs/*\n!logs/.gitkeep\n"
    )
    work = freeze(root, root, tmp_path / "runs")
    assert (work / "checkpoints").is_dir() and not (work / "checkpoints").is_symlink()
    for name in ("results", "logs"):
        assert (work / name).readlink() == root / name


def test_what_root_wrote_into_the_store_reaches_no_later_run(root: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = freeze(root, root, runs, "a")
    (first / "pkg/code.py").chmod(0o644)
    (first / "pkg/code.py").write_text("VALUE = 2\n")
    assert (freeze(root, root, runs, "b") / "pkg/code.py").read_text() == "VALUE = 1\n"


def test_a_link_into_the_code_leads_into_the_copy(root: Path, tmp_path: Path) -> None:
    (root / "pkg/again").symlink_to(root / "pkg/code.py")
    work = freeze(root, root, tmp_path / "runs")
    assert (work / "pkg/again").readlink() == Path("code.py")


def test_a_command_runs_what_was_submitted(site: Site, command: Command) -> None:
    site.write("other.py", "VALUE = 1\n")
    site.write("train.py", "import other, os; print('value', other.VALUE, os.getcwd())\n")
    done = command("submit", "--", sys.executable, "train.py")
    (path,) = site.runs.glob("train-*")
    assert f"0: value 1 {path}/work\n" in done.text
    site.write("other.py", "VALUE = 2\n")
    assert command("resume", "last", "--follow").code == 0
    assert command("logs", "last").out.count("value 1") == 2
    listed = command("submit", "--show-snapshot", "--", sys.executable, "train.py")
    assert "other.py" in listed.out and "3 files" not in listed.err
    assert len(list(site.runs.glob("train-*"))) == 1
    done = command("submit", "--no-snapshot", "--", sys.executable, "train.py")
    assert f"0: value 2 {site.folder}\n" in done.text


def test_what_is_installed_is_recorded_and_a_change_is_told(site: Site, command: Command) -> None:
    site.write("train.py", "import sys; sys.exit(0)\n")
    assert command("submit", "--", sys.executable, "train.py").code == 0
    run = RunDir(*site.runs.glob("train-*"))
    recorded = json.loads(run.versions.read_text())
    assert recorded["executable"] == sys.executable and "torch" in recorded["packages"]
    assert versions.changes(recorded, recorded) == []
    assert "changed since" not in command("logs").out
    recorded["packages"] |= {"torch": "0.1", "gone": "7"}
    run.versions.write_text(json.dumps(recorded))
    assert command("resume", "last", "--follow").code == 0
    assert "changed since submission: gone 7 -> -, torch 0.1 ->" in command("logs").out


def test_versions_are_those_of_the_jobs_environment(site: Site, command: Command) -> None:
    """Where its PATH comes first, the first attempt sees them, and the folder's own modules never
    come in between."""
    site.write("json.py", "raise SystemExit('mine')\n")
    site.write(
        "more/extra-3.dist-info/METADATA", "Metadata-Version: 2.1\nName: extra\nVersion: 3\n"
    )
    more = ("--env", f"PYTHONPATH={site.folder}/more")
    for name in (more, (*more, "--env", f"PATH={os.environ['PATH']}")):
        assert command("submit", *name, "--", sys.executable, "-c", "").code == 0
    for path in site.runs.glob("*-*"):
        assert json.loads(RunDir(path).versions.read_text())["packages"]["extra"] == "3"
    assert command("resume", "last", "--follow").code == 0
    assert "changed since" not in command("logs").out
