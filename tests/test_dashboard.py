"""The dashboard: who may ask it, what it tells, and how it ends."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Outcome, Site
from dashboards import Dashboard, started
from made import made_run

from hpcddp import ledger
from hpcddp.dashboard import door
from hpcddp.dashboard.folder import Folder, scan
from hpcddp.errors import UserError
from hpcddp.rundir import RunDir, write_json

Command = Callable[..., Outcome]
HOSTILE = "<img src=x onerror=window.hacked=1>"
NOBODY = 65534


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of several kinds, oldest first."""
    folder = tmp_path_factory.mktemp("runs")
    made = [
        made_run(folder, "done-1"),
        made_run(folder, "works-1", cause=None, last=300),
        made_run(folder, HOSTILE, ends=(), steps=20, slow=None),
        made_run(folder, "damaged-1", ends=(), steps=20, slow=None),
    ]
    made[3].job.write_text('{"format": 1')
    for i, run in enumerate(made):
        os.utime(run.job, (1e9 + i, 1e9 + i))
    elsewhere = made_run(tmp_path_factory.mktemp("elsewhere"), "secret-1", ends=(), steps=20)
    (folder / "leads-out").symlink_to(elsewhere.path)
    return folder


@pytest.fixture(scope="module")
def by_socket(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    path = tmp_path_factory.mktemp("own") / "a.sock"
    with started("--runs", str(runs), "--socket", str(path)) as made:
        yield made


@pytest.fixture(scope="module")
def by_port(runs: Path) -> Iterator[Dashboard]:
    with started("--runs", str(runs), "--port", "0") as made:
        yield made


@pytest.fixture(params=["socket", "port"])
def either(request: pytest.FixtureRequest) -> Dashboard:
    found: Dashboard = request.getfixturevalue(f"by_{request.param}")
    return found


def test_all_runs_newest_first(either: Dashboard, runs: Path) -> None:
    told = either.ask("/api/runs").json
    assert [row["run"] for row in told["runs"]] == ["damaged-1", HOSTILE, "works-1", "done-1"]
    assert (told["schema_version"], told["folder"], told["outside"]) == (1, str(runs), 1)
    rows = either.rows()
    assert {name: row["state"] for name, row in rows.items()} == {
        "damaged-1": "DAMAGED", HOSTILE: "COMPLETED", "works-1": "RUNNING", "done-1": "COMPLETED",
    }  # fmt: skip
    works = rows["works-1"]
    assert (works["step"], works["total_steps"], works["attempt"], works["slow"]) == (300, 400, 3, 1)
    assert works["to_go_s"] == pytest.approx(50) and works["samples_per_s"] == 44
    assert "job.json" not in rows["damaged-1"]["reason"] and rows["damaged-1"]["reason"]


def test_one_run(either: Dashboard) -> None:
    for name in ("works-1", HOSTILE):
        got = either.ask(f"/api/run/{quoted(name)}")
        (run,) = got.json["runs"]
        assert got.status == 200 and run["status"]["run"] == name
        assert run["curves"]["loss"] and run["log"]
    for name in ("damaged-1", "leads-out", "other"):
        got = either.ask(f"/api/run/{name}")
        assert got.status == 404 and got.json["error"]


def quoted(name: str) -> str:
    return "".join(f"%{byte:02x}" for byte in name.encode())


def test_what_has_not_changed_is_not_sent_again(by_socket: Dashboard) -> None:
    first = by_socket.ask("/api/runs")
    again = by_socket.ask("/api/runs", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    packed = by_socket.ask("/api/runs", accept_encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip" and len(packed.body) < len(first.body)


def test_the_socket_is_its_owners_alone(by_socket: Dashboard) -> None:
    found = Path(by_socket.path)
    assert stat.S_ISSOCK(found.stat().st_mode) and stat.S_IMODE(found.stat().st_mode) == 0o600
    assert f"ssh -L 8080:{found} {os.uname().nodename}\n" in by_socket.said
    assert "http://localhost:8080/\n" in by_socket.said


def test_another_user_cannot_connect(runs: Path) -> None:
    """Everybody can enter its folder: the socket's own mode keeps them out."""
    folder = Path(tempfile.mkdtemp(prefix="hpcddp-test-", dir="/tmp"))
    folder.chmod(0o755)
    path = folder / "a.sock"
    try:
        with started("--runs", str(runs), "--socket", str(path)):
            assert connects(path) and (os.geteuid() != 0 or not connects(path, NOBODY))
            path.chmod(0o666)
            assert connects(path, NOBODY if os.geteuid() == 0 else None)
    finally:
        shutil.rmtree(folder)


def connects(path: Path, user: int | None = None) -> bool:
    before = os.geteuid()
    if user is not None:
        os.seteuid(user)
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
        return True
    except PermissionError:
        return False
    finally:
        os.seteuid(before)


def test_a_port_is_of_loopback_alone(by_port: Dashboard) -> None:
    wanted = f":{by_port.port:04X}"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [row.split()[1] for rows in tables for row in rows if row.split()[3] == "0A"]
    assert [local for local in listening if local.endswith(wanted)] == [f"0100007F{wanted}"]


@pytest.mark.parametrize("target", ["/api/runs", "/api/run/works-1", "/api/run/none", "/api/"])
def test_nothing_is_told_without_the_token(by_port: Dashboard, target: str) -> None:
    guesses = ("", "Bearer ", f"Basic {by_port.token}", by_port.token, f"Bearer {by_port.token}x",
               f"Bearer {by_port.token[:-1]}", "Bearer größe")  # fmt: skip
    for guess in guesses:
        for method in ("GET", "HEAD"):
            got = by_port.ask(target, method, authorization=guess)
            assert got.status == 401 and b"works" not in got.body
    for other in (f"{target}?token={by_port.token}", target):
        got = by_port.ask(other, authorization="", cookie=f"token={by_port.token}")
        assert got.status == 401


def test_pages_hold_nothing_of_any_run(either: Dashboard, runs: Path) -> None:
    """They are the same whoever asks for whatever; their data needs the token."""
    page = either.ask("/run/works-1", authorization="").body
    assert page == either.ask("/run/none").body
    for target in ("/", "/run/x", "/assets/list.js", "/assets/run.js", "/assets/ask.js"):
        got = either.ask(target, authorization="")
        assert got.status == 200 and got.body
        for secret in ("works-1", str(runs), either.token or str(runs)):
            assert secret.encode() not in got.body
    assert len(either.token) == (0 if either.path else 43)


BAD_HOSTS = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil@localhost",
             "localhost:80:80", "[::1", "0.0.0.0", "127.0.0.2", "", "localhost/", "LOCALHOST:x",
             "localhost:8080 "]  # fmt: skip


@pytest.mark.parametrize("target", ["/", "/api/runs", "/assets/list.js", "/none"])
def test_other_names_that_lead_here_are_refused(either: Dashboard, target: str) -> None:
    for host in BAD_HOSTS[:-1]:
        assert either.ask(target, host=host).status in (400, 421), host
    for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:65535", "[::1]"):
        assert either.ask(target, host=host).status == (404 if target == "/none" else 200)


def test_other_pages_may_not_ask(either: Dashboard) -> None:
    own = {"host": "localhost:8080"}
    fine = [
        {"origin": "http://localhost:8080", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
    ]
    foreign = [
        {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:9090"},
        {"origin": "https://localhost:8080"}, {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors"},
    ]  # fmt: skip
    for headers in fine:
        assert either.ask("/api/runs", **own, **headers).status == 200
    for headers in foreign:
        for target in ("/api/runs", "/", "/assets/ask.js"):
            assert either.ask(target, **own, **headers).status == 403, headers
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert either.ask("/", **own, **link, sec_fetch_dest="document").status == 200
    assert either.ask("/", **own, **link, sec_fetch_dest="iframe").status == 403
    assert either.ask("/api/runs", **own, **link, sec_fetch_dest="document").status == 403


def test_it_only_shows(either: Dashboard) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        for target in ("/", "/api/runs", "/run/works-1"):
            assert either.ask(target, method).status in (400, 405)
    for target in ("/", "/api/runs", "/api/run/works-1"):
        got = either.ask(target, "HEAD")
        assert (got.status, got.body) == (200, b"")


def test_names_never_become_paths(either: Dashboard, runs: Path) -> None:
    up = ["..", "../..", "../elsewhere", "works-1/../works-1", "/etc", ".", "", "works-1/attempts",
          "works-1\0", "..\\..", "~", "works-1/", "%2e%2e", "*"]  # fmt: skip
    for name in up:
        for spelled in (name.replace("\0", "%00").replace("\\", "%5c"), quoted(name)):
            for base in ("/api/run/", "/assets/"):
                got = either.ask(base + spelled)
                assert got.status in (307, 404), (base, spelled)
    for target in ("/assets/../app.py", "/assets/..%2fapp.py", "//etc/passwd", "/%2e%2e/etc/passwd"):
        assert either.ask(target).status == 404


def test_every_answer_tells_the_browser_what_it_may(either: Dashboard) -> None:
    asked = [("/", {}), ("/api/runs", {}), ("/run/x", {}), ("/none", {}), ("/api/run/none", {}),
             ("/", {"host": "evil"}), ("/api/runs", {"authorization": "no"})]  # fmt: skip
    for target, headers in asked:
        got = either.ask(target, **headers).headers
        policy = got["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert got["x-content-type-options"] == "nosniff" and got["cache-control"] == "no-store"
        assert got["referrer-policy"] == "no-referrer"
        assert got["cross-origin-resource-policy"] == "same-origin"
        assert not {"server", "set-cookie"} & set(got)
        assert not [name for name in got if name.startswith("access-control")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ends_clean(tmp_path: Path, number: int) -> None:
    (tmp_path / "runs").mkdir()
    own = tmp_path / "own"
    own.mkdir(0o700)
    path = own / "a.sock"
    with started("--runs", str(tmp_path / "runs"), "--socket", str(path)) as made:
        assert made.ask("/api/runs").json["runs"] == []
        assert made.end(number) == 128 + number
        assert made.process.stderr and made.process.stderr.read() == "Ctrl-C ends it\n"
    assert not path.exists()


def test_it_ends_when_nobody_reads_it(tmp_path: Path) -> None:
    """An ssh without a terminal sends no signal at its end."""
    (tmp_path / "runs").mkdir()
    with started("--runs", str(tmp_path / "runs"), "--port", "0") as made:
        assert made.process.stdout
        made.process.stdout.close()
        assert made.process.wait(20) == 128 + signal.SIGHUP


def test_the_usual_socket_is_in_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    found = door.own_path(tmp_path)
    assert found.parent == runtime / "hpcddp"
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    assert door.own_path(tmp_path) == found != door.own_path(runtime)
    found.parent.chmod(0o755)  # somebody else's doing
    other = door.own_path(tmp_path)
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
        assert done.code == 2 and f"{path}: a dashboard listens here already" in done.err
        assert made.ask("/api/runs").status == 200
    assert not path.exists()


def test_what_cannot_be_listened_on(tmp_path: Path, command: Command, site: Site) -> None:
    assert "there is no such folder" in command("dashboard").err
    site.runs.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = {
            ("--socket", str(tmp_path / ("x" * 107))): "a socket's path has 107 at most",
            ("--socket", str(tmp_path / "file")): "is there, and is no socket",
            ("--socket", str(tmp_path / "open" / "a.sock")): "others can write there",
            ("--socket", str(tmp_path / "none" / "a.sock")): "there is no such folder",
            ("--port", port): f"port {port}: cannot be listened on: Address already in use",
            ("--port", "70000"): "70000",
            ("--port", "0", "--socket", "x"): "which of the two?",
            ("--runs", str(tmp_path / "file")): "there is no such folder",
        }
        for arguments, what in wrong.items():
            done = command("dashboard", *arguments)
            assert (done.code, done.out) == (2, "") and what in done.err, done.text
    assert (tmp_path / "file").exists()


def test_without_the_extra_it_says_what_to_install(site: Site) -> None:
    site.runs.mkdir()
    statement = "import sys; sys.modules['uvicorn'] = None; sys.argv = ['hpcddp', 'dashboard']; "
    done = subprocess.run(
        [sys.executable, "-c", statement + "from hpcddp.cli import main; main()"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "the dashboard needs uvicorn\n  pip install 'hpcddp[dashboard]'" in done.stderr


def told(folder: Folder) -> dict[str, dict[str, object]]:
    """The rows of a new look."""
    folder._all._due = 0.0
    return {row["run"]: row for row in json.loads(folder.runs().body)["runs"]}


def test_a_run_that_has_ended_is_read_once(tmp_path: Path) -> None:
    run = made_run(tmp_path, "done-1", ends=(), steps=20, slow=None)
    folder = Folder(tmp_path)
    first = told(folder)["done-1"]
    run.attempt(1).metrics.write_text("")
    assert told(folder)["done-1"] == first and first["loss"]
    facts = ledger.read(run.attempt(1))
    assert facts
    facts.cause = "crashed"
    write_json(run.attempt(1).facts, vars(facts))
    assert told(folder)["done-1"]["state"] == "FAILED"


def test_a_run_comes_grows_and_goes(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert told(folder) == {}
    run = made_run(tmp_path, "works-1", ends=(), steps=400, last=100, cause=None, slow=None)
    assert told(folder)["works-1"]["step"] == 100
    assert json.loads(folder.run("works-1").body)["runs"][0]["status"]["step"] == 100
    for record in ({"event": "train", "step": 101, "time": 1790000100.0, "loss": float("nan")},
                   {"event": "slow", "step": 101, "rank": 1}):  # fmt: skip
        with run.attempt(1).metrics.open("a") as f:
            f.write(json.dumps(record) + "\n")
    row = told(folder)["works-1"]
    assert (row["step"], row["loss"], row["slow"]) == (101, None, 1)
    shutil.rmtree(run.path)
    with pytest.raises(UserError, match="no such run"):
        folder.run("works-1")
    assert told(folder) == {}


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
    rows = told(Folder(tmp_path))
    assert set(rows) == {"good", "words", "deep", "lone", "\ufffd\ufffd"}
    assert rows["good"]["state"] == "COMPLETED" and rows["words"]["state"] == "DAMAGED"


def test_links_that_lead_out_are_not_shown(tmp_path: Path) -> None:
    runs, other = tmp_path / "runs", tmp_path / "other"
    for folder in (runs, other):
        folder.mkdir()
        made_run(folder, "a", ends=(), steps=20)
    (runs / "out").symlink_to(other / "a")
    (runs / "in").symlink_to("a")
    (runs / "loop").symlink_to("loop")
    found, outside = scan(runs)
    assert ({run.name for run in found}, outside) == ({"a", "in"}, 1)
    (tmp_path / "linked").symlink_to(runs)  # the folder itself may be a link
    assert len(scan(tmp_path / "linked")[0]) == 2


def test_slurm_is_asked_once_for_all_runs(site: Site) -> None:
    site.runs.mkdir()
    for name in ("a-1", "b-1", "c-1"):
        made_run(site.runs, name, ends=(), steps=20, last=10, cause=None)
    row = "echo '17|SUSPENDED|Priority|2030-01-01T10:00:00|x|n7|a-1'"
    site.slurm(squeue=f"echo asked >> {site.folder}/asked; {row}")
    folder = Folder(site.runs)
    assert told(folder)["a-1"]["state"] == "RUNNING"  # by its folder: Slurm has not answered yet
    until = time.monotonic() + 20
    while told(folder)["a-1"]["state"] == "RUNNING" and time.monotonic() < until:
        time.sleep(0.02)
    rows = told(folder)
    assert (rows["a-1"]["state"], rows["a-1"]["reason"]) == ("SUSPENDED", "Priority")
    assert rows["b-1"]["state"] == "LOST"
    for _ in range(5):
        told(folder)
    assert (site.folder / "asked").read_text() == "asked\n"
    run = RunDir(site.runs / "a-1")  # what its folder says later is newer than Slurm's word
    ledger.end(run, 1, 0, "done")
    assert told(folder)["a-1"]["state"] == "COMPLETED"


def test_many_tabs_are_one_look(tmp_path: Path) -> None:
    made_run(tmp_path, "done-1", ends=(), steps=20)
    folder = Folder(tmp_path)
    assert folder.runs() is folder.runs()
    assert folder.run("done-1") is folder.run("done-1")
