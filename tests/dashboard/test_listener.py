"""Where the dashboard listens, what it refuses there, and how it ends."""

import http.client
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from dashboards import started
from made import made_run
from sites import Outcome, Site

from hpcddp.dashboard import app, listener
from hpcddp.errors import UserError

Command = Callable[..., Outcome]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path that leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="d-") as made:
        yield Path(made)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ends_clean(tmp_path: Path, number: int) -> None:
    (tmp_path / "runs").mkdir()
    own = tmp_path / "own"
    own.mkdir(0o700)
    path = own / "a.sock"
    with started("--runs", str(tmp_path / "runs"), "--socket", str(path)) as made:
        assert made.ask("/api/runs").json["runs"] == []
        assert made.end(number) == 128 + number
        assert made.process.stderr and made.process.stderr.read() == "press Ctrl-C to stop\n"
    assert not path.exists()


def test_paths_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")  # as in most locales
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.mkdir(0o700)
    run = made_run(odd, "bad", ends=(), steps=20, slow=None)
    run.job.write_text("{")
    name = os.fsdecode(b"bad\xfe")
    run.path.rename(odd / name)
    with started("--runs", str(odd), "--socket", str(odd / "s")) as made:
        (row,) = made.ask("/api/runs").json["runs"]
        assert (row["run"], row["state"]) == ("bad\ufffd", "DAMAGED")
        got = made.ask("/api/run/bad%EF%BF%BD")
        assert got.status == 404 and "job.json: is damaged" in got.json["error"]


def test_others_hold_so_many_connections_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with started("--runs", str(tmp_path / "runs"), "--port", "0") as made, ExitStack() as held:
        links = [
            held.enter_context(socket.create_connection(("127.0.0.1", made.port)))
            for _ in range(app.CONNECTIONS + 3)
        ]
        closed: set[socket.socket] = set()
        while len(closed) < 3:
            more = select.select([link for link in links if link not in closed], [], [], 10)[0]
            assert more, "all are held"
            closed |= set(more)
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            made.ask("/api/runs")
        held.close()
        while True:  # until it has seen that they are gone
            with suppress(ConnectionError, http.client.BadStatusLine):
                assert made.ask("/api/runs").status == 200
                break


def test_it_ends_when_nobody_reads_it(tmp_path: Path) -> None:
    """An ssh without a terminal sends no signal at its end."""
    (tmp_path / "runs").mkdir()
    with started("--runs", str(tmp_path / "runs"), "--port", "0") as made:
        assert made.process.stdout
        made.process.stdout.close()
        assert made.process.wait(20) == 128 + signal.SIGHUP


def test_the_usual_socket_is_in_a_folder_of_ones_own(
    tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = short / "runtime"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    path = listener.own_path(tmp_path)
    assert path.parent == runtime / "hpcddp"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert listener.own_path(tmp_path) == path != listener.own_path(runtime)
    path.parent.chmod(0o755)  # somebody else's doing
    other = listener.own_path(tmp_path)
    assert other.parent.parent == Path(tempfile.gettempdir())
    assert stat.S_IMODE(other.parent.stat().st_mode) == 0o700


def test_a_socket_that_is_left_over_gives_way_and_one_that_lives_does_not(
    tmp_path: Path, command: Command, site: Site
) -> None:
    site.runs.mkdir()
    path = tmp_path / "a.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with started("--runs", str(site.runs), "--socket", str(path)) as made:
        assert made.ask("/api/runs").status == 200
        done = command("dashboard", "--socket", str(path))
        assert done.code == 2 and f"{path}: a dashboard already listens on this socket" in done.err
        assert made.ask("/api/runs").status == 200
    assert not path.exists()


def test_what_cannot_be_listened_on(tmp_path: Path, command: Command, site: Site) -> None:
    assert f"{site.runs}: no such folder" in command("dashboard").err
    site.runs.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = {
            (
                "--socket",
                str(tmp_path / ("x" * 107)),
            ): "the path of a socket must be at most 107 bytes",
            ("--socket", str(tmp_path / "file")): "this file is not a socket",
            ("--socket", str(tmp_path / "open" / "a.sock")): "other users can write to this folder",
            (
                "--socket",
                str(tmp_path / "none" / "a.sock"),
            ): "cannot use this folder for the socket",
            ("--port", port): f"port {port}: cannot listen here: Address already in use",
            ("--port", "70000"): "70000",
            ("--port", "0", "--socket", "x"): "--socket and --port cannot be used together",
            ("--runs", str(tmp_path / "file")): "not a folder",
        }
        for arguments, what in wrong.items():
            done = command("dashboard", *arguments)
            assert (done.code, done.out) == (2, "") and what in done.err, done.text
    assert (tmp_path / "file").exists()


def test_nobody_can_move_the_folder_of_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shared", "tmp"):
        (tmp_path / name / "mine" / "own").mkdir(parents=True)
        (tmp_path / name / "mine").chmod(0o700)
    (tmp_path / "shared").chmod(0o775)  # a project's folder: its group can rename what is there
    with pytest.raises(UserError, match="other users can write to this folder") as refused:
        listener.on_socket(tmp_path / "shared" / "mine" / "own" / "s").__enter__()
    assert refused.value.where == str(tmp_path / "shared")
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "shared" / "link").symlink_to(tmp_path / "tmp" / "mine")
    with listener.on_socket(tmp_path / "shared" / "link" / "own" / "s") as opened:
        assert opened.address == str(tmp_path / "tmp" / "mine" / "own" / "s")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "shared" / "mine"))
    assert tmp_path not in listener.own_path(tmp_path).parents
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="cannot use this folder for the socket"):
        listener.on_socket(tmp_path / "loop" / "s").__enter__()


def test_without_the_extra_it_says_what_to_install(site: Site) -> None:
    site.runs.mkdir()
    statement = "import sys; sys.modules['uvicorn'] = None; sys.argv = ['hpcddp', 'dashboard']; "
    done = subprocess.run(
        [sys.executable, "-c", statement + "from hpcddp.cli import main; main()"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "the dashboard needs the package uvicorn" in done.stderr
    assert "install the extra `dashboard` of hpcddp" in done.stderr
