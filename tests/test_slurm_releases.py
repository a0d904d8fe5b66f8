"""Slurms of other releases: a set-up that fails, what a run leaves, and removal."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_releases
import slurm_smoke
from mounts import mounts
from sites import CHECKOUT

SLURMS = CHECKOUT / "scripts" / "slurms"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURMS_ROOT", str(tmp_path / "slurms"))
    (tmp_path / "slurms").mkdir()
    return tmp_path / "slurms"


def slurms(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SLURMS, *words], capture_output=True, text=True, timeout=200, **options)  # type: ignore[call-overload, no-any-return]


def a_release(root: Path, version: str = "24.11") -> Path:
    """The folder of one that looks ready."""
    folder = root / version
    (folder / "usr/inner").mkdir(parents=True)
    (folder / slurm_releases.MARK).write_text(json.dumps({"slurm": f"{version}.5"}))
    return folder


def with_a_mount(at: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A shell script that runs where there is a file system at that place, with a file on it."""
    if not (words := mounts()):
        pytest.skip("no mounts of one's own here")
    begin = 'mount -t tmpfs tmpfs "$AT" && touch "$AT/kept"\n'
    return subprocess.run(
        [*words, "sh", "-c", begin + script], env={**os.environ, "AT": str(at)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_a_folder_with_a_mount_in_it_is_not_removed(root: Path) -> None:
    folder = a_release(root)
    script = f'{SLURMS} remove 24.11; echo "code $?"; ls "$AT" {folder}\n'
    script += f'umount "$AT"; {SLURMS} remove 24.11; echo "then $?"'
    done = with_a_mount(folder / "usr/inner", script)
    assert f"{folder}/usr/inner" in done.stderr and "umount" in done.stderr
    assert "code 1\n" in done.stdout and "kept" in done.stdout and "then 0" in done.stdout
    assert slurm_releases.MARK in done.stdout  # it was still whole
    assert not folder.exists()


def test_removal_stays_on_its_file_system(root: Path) -> None:
    """Even if a mount comes after the look."""
    folder = a_release(root)
    program = f"import slurm_releases as s; s.delete(s.Path({str(folder)!r}))"
    script = f"cd {CHECKOUT}/tests/support && {sys.executable} -c '{program}'; ls \"$AT\""
    done = with_a_mount(
        folder / "usr/inner", script.replace("'" + str(folder) + "'", f'"{folder}"')
    )
    assert "could not be removed" in done.stderr and done.stdout == "kept\n"


def test_a_folder_of_another_name_beside_it_does_not_count(root: Path) -> None:
    folder = a_release(root)
    (beside := root / "24.11.2").mkdir()
    done = with_a_mount(beside, f'{SLURMS} remove 24.11; ls "$AT"')
    assert done.stdout == "kept\n" and not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_release_that_cannot_be_had_is_listed_with_the_reason(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/debootstrap"
    program.write_text(
        '#!/bin/sh\nfor folder; do case $folder in *.new) mkdir -p "$folder/half"; esac; done\n'
        "echo I: Retrieving\necho E: no such suite\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    done = slurms("set-up", "24.11")
    assert done.returncode == 1 and "debootstrap of trixie: E: no such suite" in done.stderr
    assert "24.11  trixie    debootstrap of trixie: E: no such suite\n" in slurms("list").stdout
    assert not (root / "24.11").exists() and not (root / "24.11.new").exists()
    row = slurm_smoke.run(["24.11"])["24.11"]
    assert row == {"reason": "debootstrap of trixie: E: no such suite"}
    assert "24.11: debootstrap of trixie: E: no such suite" in slurm_smoke.table({"24.11": row})
    assert slurm_smoke.failures({"24.11": row}) == 0
    assert slurms("remove", "24.11").returncode == 0
    assert "24.11  trixie    not set up\n" in slurms("list").stdout


@pytest.fixture
def own(root: Path) -> str:
    """The release that is this machine's own Slurm."""
    if os.geteuid() or not slurm_releases.ready(slurm_releases.HERE):
        pytest.skip(f"needs root, and Slurm {slurm_releases.HERE}")
    return slurm_releases.HERE


def commands() -> Iterator[list[str]]:
    """What runs on this machine, word by word."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield entry.read_text(errors="replace").split("\0")[:-1]


def test_a_command_leaves_nothing_outside_of_its_folders(own: str, root: Path) -> None:
    mark = Path("/tmp", f"of-{root.parent.name}")
    script = f"touch {mark} /root/x /var/tmp/x && mount -t tmpfs tmpfs /mnt; touch /usr/{mark.name}"
    script += "; grep -c : /proc/net/dev; getent hosts localhost"
    sleep = ["sleep", f"9{os.getpid()}"]
    script += f"; setsid {' '.join(sleep)} & until pgrep -x sleep; do :; done; exit 7"
    before = Path("/proc/self/mountinfo").read_text()
    done = slurms("run", own, "sh", "-c", script, cwd=CHECKOUT)
    assert done.returncode == 7, done.stderr
    interfaces, name, *_ = done.stdout.splitlines()
    assert interfaces == "1" and name.split()[0] in ("127.0.0.1", "::1")
    assert "Read-only" in done.stderr and not mark.exists()
    assert Path("/proc/self/mountinfo").read_text() == before
    assert not any(words == sleep for words in commands())


def test_a_release_in_use_is_not_removed(own: str, root: Path) -> None:
    with subprocess.Popen(
        [SLURMS, "run", own, "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE
    ) as running:
        try:
            assert running.stdout and running.stdout.readline()
            done = slurms("remove", own)
            assert done.returncode == 1 and "in use" in done.stderr
        finally:
            running.terminate()
            running.wait(60)
    assert slurms("remove", own).returncode == 0  # nothing of it runs on


def test_a_command_that_is_not_there(own: str) -> None:
    done = slurms("run", own, "no-such-program")
    assert done.returncode == 127 and "no-such-program: No such file" in done.stderr
    assert slurms("run", "24.11", "true").returncode == 1
    assert slurms("run", "1.0", "true").returncode == 2


REPORT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="smoke" value="submit"/></properties></testcase>
<testcase name="b"><properties><property name="smoke" value="array"/></properties>
<failure/></testcase>
<testcase name="c"><properties><property name="smoke" value="array"/></properties></testcase>
<testcase name="d"/></testsuite></testsuites>"""


def test_a_test_that_failed_once_failed() -> None:
    row = slurm_smoke.outcomes(REPORT)
    assert row == {"submit": "passed", "array": "failed"}
    rows = {"24.11": {"slurm": "24.11.5", **row}, "26.05": {"reason": "no root"}}
    assert slurm_smoke.failures(rows) == 1
    assert slurm_smoke.table(rows).splitlines() == [
        "| Slurm | 24.11.5 | 26.05 |",
        "| --- | --- | --- |",
        "| submit | passed | not run |",
        "| array | failed | not run |",
        "",
        "26.05: no root",
    ]


def test_readme_tells_what_was_recorded() -> None:
    rows = json.loads(slurm_smoke.RECORD.read_text())
    made = f"{slurm_smoke.HEADING}{slurm_smoke.summary(rows)}\n## "
    assert made in slurm_smoke.README.read_text()
    assert list(rows) == list(slurm_releases.SUITES)


def test_what_was_recorded_is_the_smoke_set() -> None:
    """A new test belongs into the table."""
    texts = [path.read_text() for path in (CHECKOUT / "tests/slurm").glob("test_*.py")]
    marked = {label for text in texts for label in re.findall(r'mark\.smoke\("([^"]+)"', text)}
    assert marked
    for row in json.loads(slurm_smoke.RECORD.read_text()).values():
        assert row.keys() == {"reason"} or row.keys() == {"slurm", *marked}
