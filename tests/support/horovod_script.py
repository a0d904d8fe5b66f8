"""A script that uses Horovod, and what its ranks do."""

import contextlib
import re
import socket
import time

import pages
import pytest
from sites import CHECKOUT

PAGE = CHECKOUT / "docs" / "howto" / "horovod.md"

RESULT = re.compile(r"ranks (\d+), loss ([\d.]+), weights ([\d.]+)")

ASK = """
import os, sys
from http.client import HTTPConnection
address = [os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT")]
def ask(method, key, value=None):
    connection = HTTPConnection(*address, timeout=60)
    connection.request(method, f"/global/{key}", value)
    answer = connection.getresponse()
    return answer.status, answer.read()
"""

# As a rank meets the others: it leaves a value and waits for theirs. When all have met, one fails.
MEET = f"""{ASK}
import json, signal, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
told = {{k: v for k, v in os.environ.items() if k.startswith("HOROVOD_") or k == "RANK"}}
rank, size = told["HOROVOD_RANK"], int(told["HOROVOD_SIZE"])
assert ask("PUT", rank, rank.encode() * 9)[0] == 200
for other in map(str, range(size)):
    while (found := ask("GET", other)) == (404, b""):
        time.sleep(0.02)
    assert found == (200, other.encode() * 9)
open(f"{{rank}}.new", "w").write(json.dumps(told))
os.rename(f"{{rank}}.new", f"told-{{rank}}")
while not all(os.path.exists(f"told-{{other}}") for other in range(size)):
    time.sleep(0.02)
if rank == "1" and "fail" in sys.argv:
    sys.exit(3)
time.sleep(60)
"""


def script(mark: str) -> str:
    """The page's script, in Horovod (-) or in DDP (+)."""
    (diff,) = (block for block in pages.blocks(PAGE) if block.language == "diff")
    return diff.side(mark)


def same(found: list[tuple[str, ...]]) -> None:
    """Two results agree: in all digits where two ranks' gradients are summed, as the order of two
    means nothing."""
    one, other = found
    assert one == other or (
        one[0] == other[0] == "4"
        and [float(x) for x in one[1:]] == pytest.approx([float(x) for x in other[1:]], rel=1e-6)
    )


def gone(port: int) -> None:
    """Wait until nobody answers at a port of this machine."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(ConnectionRefusedError):
        while time.monotonic() < deadline:
            with socket.create_connection(("127.0.0.1", port), timeout=60):
                time.sleep(0.05)
        raise AssertionError(f"somebody still answers at port {port}")
