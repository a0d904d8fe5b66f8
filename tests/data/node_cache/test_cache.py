"""The node's cache, used by real processes that are killed or get no space."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from mounts import mounts
from sites import record_run

from hpcddp import spec
from hpcddp.data.node_cache import cache as caches
from hpcddp.data.node_cache import claims, disk, sweep, usage
from hpcddp.data.node_cache.cache import Cache
from hpcddp.errors import ObjectMissing
from hpcddp.rundir import RunDir

K = 1024
# A process that gets keys 0 to COUNT - 1, and appends a line to the file `fetched` for each fetch.
READER = """
import os, sys, time
from pathlib import Path
from hpcddp.data.node_cache.cache import Cache
folder, fetched, limit, size, count, slow = sys.argv[1:]
cache = Cache(Path(folder), int(limit))
def content(key): return bytes([key % 251]) * int(size)
def read(key):
    def fetch(file):
        with open(fetched, "a") as log: log.write(f"{key} {os.getpid()}\\n")
        data = content(key)
        file.write(data[:len(data) // 2]); file.flush()
        if float(slow): print("half", flush=True)
        time.sleep(float(slow))
        file.write(data[len(data) // 2:])
    return cache.get(f"key {key}", int(size), fetch)
"""
GO = READER + "sys.stdin.readline()\n"
ALL = """
for key in range(int(count)):
    with read(key) as file:
        assert file.read() == content(key), key
"""


def start(
    code: str, folder: Path, *, limit: int = 1 << 20, size: int = K, count: int = 1, slow: float = 0
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    words = [folder, folder.parent / "fetched", limit, size, count, slow]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def go(processes: list[subprocess.Popen[str]]) -> None:
    """Let all processes start at once."""
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()


def end(processes: list[subprocess.Popen[str]]) -> None:
    go(processes)
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err


def fetched(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder.parent / "fetched").read_text().splitlines()]


def files(folder: Path) -> list[Path]:
    """All files of a cache except its journal."""
    return [path for path in folder.glob("[0-9a-f][0-9a-f]/*") if path.is_file()]


def put(cache: Cache, key: str, size: int = K) -> bytes | None:
    """The content of a key: its first character, repeated."""

    def fetch(file: BinaryIO) -> None:
        file.write(key[:1].encode() * size)

    return read(cache, key, fetch, size)


def never(file: BinaryIO) -> None:
    raise AssertionError("fetched again")


def read(
    cache: Cache, key: str, fetch: Callable[[BinaryIO], object] = never, size: int = K
) -> bytes | None:
    content = cache.get(key, size, fetch)
    if content is None:
        return None
    with content:
        return content.read()


def has(cache: Cache, key: str) -> bool:
    return (cache.folder / name(key)).exists()


def name(key: str) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return f"{digest[:2]}/{digest[2:]}"


def test_of_many_processes_one_fetches(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    end([start(GO + ALL, folder, count=200) for _ in range(6)])
    assert sorted(map(int, fetched(folder))) == list(range(200))
    assert {path.stat().st_size for path in files(folder)} == {
        K
    }  # neither a claim nor a part is left


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    killed = start(READER + "read(0)", folder, slow=600)
    assert killed.stdout and killed.stdout.readline() == "half\n"
    waits = start(READER + "print('begins', flush=True)" + ALL, folder)
    assert waits.stdout and waits.stdout.readline() == "begins\n"
    time.sleep(0.3)
    assert fetched(folder) == ["0"] and waits.poll() is None  # it waits for the living process
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    end([waits])
    assert fetched(folder) == ["0", "0"]
    (left,) = files(folder)
    assert left.stat().st_size == K
    cache = Cache(folder, 1 << 20)
    assert cache._usage.total() == K


def test_what_another_container_fetches_stays_while_it_is_young(tmp_path: Path) -> None:
    """The other container's processes are not visible here, and PIDs there are other processes."""
    cache, key = Cache(tmp_path, 10 * K), tmp_path / name("a")
    theirs = f"{os.getpid()}-1-00000000"
    for number in (0, 1):
        key.parent.mkdir(exist_ok=True)
        claim, part = key.with_suffix(".claim"), key.with_name(f".{key.name}.{theirs}.token.part")
        claim.write_text(f"{theirs} {K} token")
        part.write_text("half")
        if number:
            os.utime(claim, (1, 1))
            os.utime(part, (1, 1))
        cache._sweep(0, 0)
        assert claim.exists() == part.exists() == (not number)
        assert claims.held(claim) == (not number)
    assert put(cache, "a") and [path.name for path in files(tmp_path)] == [key.name]


def test_marks_of_two_pid_namespaces_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = claims.mark()
    assert claims.lives(mine, tmp_path / "nothing") and mine.count("-") == 2 and "." not in mine
    (tmp_path / "pid").symlink_to("pid:[1]")
    monkeypatch.setattr(claims, "SPACE", tmp_path / "pid")
    assert claims._space() != mine.rpartition("-")[2]


def test_the_least_recently_used_go_and_who_reads_them_reads_on(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * K)
    now = time.time()
    for number in range(10):
        put(cache, f"{number}")
        os.utime(tmp_path / name(f"{number}"), (now, now - 1000 + number))
    assert read(cache, "0") and read(cache, "1")  # used just now
    reader = (tmp_path / name("2")).open("rb")
    assert put(cache, "new")
    left = [number for number in range(10) if has(cache, f"{number}")]
    assert left == [0, 1, 4, 5, 6, 7, 8, 9]  # room for the new one, and a tenth of the limit
    with reader:
        assert reader.read() == b"2" * K


def test_what_nobody_has_used_for_weeks_goes(tmp_path: Path, monkeypatch) -> None:
    cache = Cache(tmp_path, 10 * K)
    for key, days in {"a": 15, "b": 13}.items():
        put(cache, key)
        os.utime(tmp_path / name(key), (1, time.time() - days * 86400))
    monkeypatch.setattr(caches, "RECOUNT", -1.0)
    assert put(cache, "c") and not has(cache, "a") and has(cache, "b")
    assert cache._usage.total() == 2 * K


def test_the_limit_holds_whoever_writes(tmp_path: Path) -> None:
    folder, limit = tmp_path / "cache", 64 * K
    code = GO + ALL.replace("with read(key) as file:", "file = read(key)\n    if file:")
    processes = [start(code, folder, limit=limit, size=3 * K, count=150) for _ in range(4)]
    go(processes)
    most, over = 0, False
    while not over:
        over, total = all(process.poll() is not None for process in processes), 0
        for path in files(folder):
            try:
                total += path.stat().st_size if "." not in path.name else 0
            except FileNotFoundError:
                continue
        most = max(most, total)
    for process in processes:
        assert process.communicate()[1] == "" and process.returncode == 0
    assert limit / 2 < most <= limit
    cache = Cache(folder, limit)
    assert cache._usage.total() >= sum(path.stat().st_size for path in files(folder)) > limit / 2


def test_accounts_are_put_right_by_what_is_there(tmp_path: Path, monkeypatch) -> None:
    cache = Cache(tmp_path, 100 * K)
    assert put(cache, "a") and put(cache, "b")
    (tmp_path / name("a")).unlink()  # removed by a cleaner of /tmp
    cache._usage.add(98 * K)  # of killed processes
    assert put(cache, "c")
    assert cache._usage.total() == 2 * K
    with (tmp_path / "usage").open("ab") as journal:
        journal.write(b"torn")
    assert put(cache, "d") and read(cache, "d")
    monkeypatch.setattr(caches, "RECOUNT", -1.0)
    assert put(cache, "e") and cache._usage.total() == 4 * K


def test_what_comes_while_the_accounts_are_put_right_is_counted(
    tmp_path: Path, monkeypatch
) -> None:
    """A duplicated entry is better than a missing one."""
    mine, other = (usage.Usage(tmp_path / "usage") for _ in range(2))
    mine.renew(0, mine.position())
    since, real = mine.position(), time.time_ns
    other.add(3)

    def late() -> int:
        """While the journal is rewritten, another process reads the old one."""
        monkeypatch.setattr(time, "time_ns", real)
        other.add(5)
        return real()

    monkeypatch.setattr(time, "time_ns", late)
    mine.renew(100, since)
    assert mine.total() == other.total() == 108
    (folder := tmp_path / "cache").mkdir()
    cache = Cache(folder, 10 * K)
    assert put(cache, "a")
    path = cache.folder / name("a")
    # Claims that are dropped, or left, when their file is already complete.
    assert sweep._claimed(path.with_suffix(".claim")) == K
    path.with_suffix(".claim").write_text(f"1-1-{claims.mark().rpartition('-')[2]} {K} x")
    assert cache._claim(path.with_suffix(".claim"), K) and cache._usage.total() == K


def test_content_of_another_size_is_dropped(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * K)
    assert read(cache, "a", lambda file: file.write(b"x" * 5)) is None
    assert not files(tmp_path) and cache._usage.total() == 0
    assert put(cache, "a")
    os.truncate(tmp_path / name("a"), 7)  # a machine after a power loss
    assert put(cache, "a") == b"a" * K


def test_what_fetching_raises_flies_and_leaves_nothing(tmp_path: Path) -> None:
    def lost(file: BinaryIO) -> None:
        file.write(b"x")
        raise ObjectMissing("no such sample", where="s3://b/x")

    cache = Cache(tmp_path, 10 * K)
    with pytest.raises(ObjectMissing, match="no such sample"):
        read(cache, "a", lost)
    assert not files(tmp_path) and cache._usage.total() == 0
    assert put(cache, "a")


def test_what_is_too_big_or_switched_off_is_not_fetched(tmp_path: Path) -> None:
    assert Cache(tmp_path, K).get("a", K + 1, never) is None
    assert Cache(tmp_path, 0).get("a", 0, never) is None
    assert not list(tmp_path.iterdir())


# In its own mount, or, where that is not allowed, in a process with a limit on the size of files.
FULL = """
import os, resource, subprocess, sys
from pathlib import Path
folder, outside, small = Path(sys.argv[1]), Path(sys.argv[2]), 64 << 10
if sys.argv[3] == "tmpfs":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
from hpcddp.data.node_cache import cache as caches
def fetch(file, size): file.write(b"x" * size)
def get(cache, key, size):
    return cache.get(key, size, lambda file: file.write(b"x" * size) and None)
cache = caches.Cache(folder, 1 << 30)
kept = [bool(get(cache, f"{n}", small)) for n in range(100)]
assert all(kept), kept  # the oldest went for the newest
if sys.argv[3] == "tmpfs":
    facts = os.statvfs(folder)
    assert facts.f_bavail >= 0.05 * facts.f_blocks
    caches.SPARE = -100.0  # as where others fill the disk meanwhile
    with open(folder / "theirs", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * small): pass
        except OSError: pass
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (small // 2, resource.RLIM_INFINITY))
print("full", flush=True)
assert get(cache, "new", small) or sys.argv[3] != "tmpfs"  # others made room
assert get(cache, "large", 5 << 20) is None
assert get(cache, "larger", 5 << 20) is None
print("went on")
"""


def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    within = mounts()
    words = [sys.executable, "-c", FULL, tmp_path / "cache", tmp_path]
    done = subprocess.run([*within, *words, "tmpfs" if within else "limit"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.stdout == "full\nwent on\n", done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("hpcddp: cannot cache all data in ")
    assert ("No space left" if within else "File too large") in line


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, capfd) -> None:
    cache = Cache(tmp_path / "gone", 10 * K)
    assert put(cache, "a") is None and put(cache, "b") is None
    assert capfd.readouterr().err.count("\n") == 1


def of(environ: dict[str, str], folder: Path, **keys: object) -> Cache:
    values = {key.replace("__", "."): value for key, value in keys.items()}
    run = RunDir(folder / f"run-{len(list(folder.iterdir()))}")
    run.path.mkdir()
    record_run(run, spec=spec.to_dict(spec.KEYS.build(values)))
    return caches.of_run({**environ, "HPCDDP_RUN_DIR": str(run.path)})


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_disk_that_breaks_is_no_error(tmp_path: Path, number: int, capfd) -> None:
    """The caller reads from the data's source."""

    def broken(file: BinaryIO) -> None:
        raise OSError(number, os.strerror(number))

    cache = Cache(tmp_path, 10 * K)
    assert read(cache, "a", broken) is None
    assert not files(tmp_path) and cache._usage.total() == 0
    assert os.strerror(number) in capfd.readouterr().err


def test_each_run_has_the_cache_that_it_asks_for(tmp_path: Path, capfd) -> None:
    place = tmp_path / "node"
    place.mkdir()
    environ = {"SLURM_TMPDIR": str(tmp_path / "elsewhere"), "TMPDIR": str(place)}
    cache = of(environ, tmp_path)
    assert (cache.folder, cache.limit) == (place / f"hpcddp-cache-{os.geteuid()}", 10 << 30)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert of(environ, tmp_path, data__cache="1.5K").limit == 1536
    assert of(environ, tmp_path, data__cache="0").limit == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_memory_is_no_disk(tmp_path: Path, kind: str, monkeypatch, capfd) -> None:
    """A job can set the size of a cache in memory."""
    place = tmp_path / "the node"
    place.mkdir()
    escaped = str(place).replace(" ", r"\040")
    mounts = f"/dev/sda / ext4 rw 0 0\nnone {escaped} {kind} rw 0 0\n"
    (tmp_path / "mounts").write_text(mounts)
    monkeypatch.setattr(disk, "MOUNTS", tmp_path / "mounts")
    for _ in range(3):
        assert of({"TMPDIR": str(place)}, tmp_path).limit == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hpcddp: no cache: ") and "memory" in line
    assert of({"TMPDIR": str(place)}, tmp_path, data__cache="2G").limit == 2 << 30
    assert of({"TMPDIR": str(tmp_path)}, tmp_path).limit == 10 << 30


@pytest.mark.parametrize("what", ["link", "open", "file"])
def test_a_folder_that_others_may_have_made_is_refused(tmp_path: Path, what: str, capfd) -> None:
    makes: dict[str, Callable[[Path], object]] = {
        "link": lambda path: path.symlink_to(tmp_path / "theirs"),
        "open": lambda path: (path.mkdir(), path.chmod(0o770)),
        "file": lambda path: path.touch(),
    }
    (tmp_path / "theirs").mkdir()
    (tmp_path / "node").mkdir()
    makes[what](tmp_path / "node" / f"hpcddp-cache-{os.geteuid()}")
    assert of({"TMPDIR": str(tmp_path / "node")}, tmp_path).limit == 0
    assert capfd.readouterr().err.startswith("hpcddp: no cache: ")


def test_a_fork_uses_it_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(caches, "_shared", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.delenv("HPCDDP_RUN_DIR", raising=False)
    cache = caches.shared()
    assert put(cache, "a") and caches.shared() is cache
    end_, begin = os.pipe()
    if not (pid := os.fork()):
        try:
            good = caches.shared() is cache and read(cache, "a") and put(cache, "b")
            os.write(begin, b"y" if good else b"n")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(begin)
    with open(end_, "rb") as answer:
        assert answer.read() == b"y"
    assert read(cache, "b")
    assert cache._usage.total() == 2 * K


def test_what_is_kept_is_read_at_once_and_counts_as_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 20)
    assert cache.read("a", 3) is None
    with cache.get("a", 3, lambda file: file.write(b"abc")) or pytest.fail("not kept"):
        pass
    (kept,) = (path for path in tmp_path.glob("??/*") if path.is_file())
    os.utime(kept, (1, 1))
    assert cache.read("a", 3) == b"abc" and kept.stat().st_mtime > 1
    assert cache.read("a", 4) is None and cache.read("b", 3) is None
