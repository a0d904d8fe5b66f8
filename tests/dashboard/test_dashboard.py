"""The dashboard: who may ask it, what it tells, and how it ends."""

import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dashboards import Dashboard, started
from made import made_run
from sites import Outcome

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
    dashboard: Dashboard = request.getfixturevalue(f"by_{request.param}")
    return dashboard


def test_all_runs_newest_first(either: Dashboard, runs: Path) -> None:
    data = either.ask("/api/runs").json
    assert [row["run"] for row in data["runs"]] == ["damaged-1", HOSTILE, "works-1", "done-1"]
    assert (data["schema_version"], data["folder"], data["outside"]) == (1, str(runs), 1)
    rows = either.rows()
    assert {name: row["state"] for name, row in rows.items()} == {
        "damaged-1": "DAMAGED", HOSTILE: "COMPLETED", "works-1": "RUNNING", "done-1": "COMPLETED",
    }  # fmt: skip
    works = rows["works-1"]
    assert (works["step"], works["total_steps"], works["attempt"], works["slow"]) == (
        300,
        400,
        3,
        1,
    )
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
    until = time.monotonic() + 60
    while not by_socket.rows()["works-1"]["stale"]:  # Slurm is asked aside
        assert time.monotonic() < until
        time.sleep(0.05)
    first = by_socket.ask("/api/runs")
    again = by_socket.ask("/api/runs", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    packed = by_socket.ask("/api/runs", accept_encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip" and len(packed.body) < len(first.body)


def test_the_socket_is_its_owners_alone(by_socket: Dashboard) -> None:
    path = Path(by_socket.path)
    assert stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"ssh -L 8080:{path} {os.uname().nodename}\n" in by_socket.said
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


SECRET = ["/api/runs", "/api/run/works-1", "/api/run/none", "/api/", "/none", "//", "/api/runs/",
          "//api/runs", "/api", "/run/a/b"]  # fmt: skip


@pytest.mark.parametrize("target", SECRET)
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
        for target in ("/", "/api/runs", "/run/works-1", "/none"):
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
                assert got.status == 404, (base, spelled)
    for target in (
        "/assets/../app.py",
        "/assets/..%2fapp.py",
        "//etc/passwd",
        "/%2e%2e/etc/passwd",
    ):
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
