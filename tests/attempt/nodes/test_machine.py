import os
import socket
from pathlib import Path

import pytest

from hpcddp.attempt.nodes import machine

SMI = """\
#!/bin/sh
echo "NVIDIA A100, GPU-1, 550.54, 81920, 0, 41, 0x0000000000000000"
echo "NVIDIA A100, GPU-2, 550.54, 81920, 2, 91, 0x0000000000000048"
echo "NVIDIA A100, GPU-3, 550.54, 81920, [N/A], 30, 0x0000000000000001"
"""


def program(folder: Path, text: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(text)
    path.chmod(0o755)


def test_gpus_tell_their_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, SMI)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    rows = machine.gpus()
    assert [row["ecc_errors"] for row in rows] == ["0", "2", "[N/A]"]
    assert [machine.throttled(row) for row in rows] == [
        [],
        ["hardware slowdown", "too hot (hardware)"],
        [],  # idle
    ]


def test_a_driver_that_fails_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.gpus() == []


def test_interfaces_that_are_up_with_their_speed(tmp_path: Path) -> None:
    for name, state, speed in (("lo", "up", ""), ("ib0", "up", "200000"), ("eth1", "down", "1000"),
                               ("bond0", "unknown", "-1")):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")
        (tmp_path / name / "speed").write_text(speed + "\n")
    assert dict(machine.interfaces(tmp_path)) == {"bond0": 0, "ib0": 200000}


def test_the_test_of_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    times = machine.write_times(tmp_path)
    assert 0 < times["median"] <= times["longest"]
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_does_not_answer_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert machine.reachable("127.0.0.1", port) == ""
    assert "refused" in machine.reachable("127.0.0.1", port)


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    facts = machine.read(tmp_path)
    assert facts["host"] and facts["architecture"] and facts["folder"]["free"] > 0
    assert machine.space(tmp_path / "none") == {}
    assert machine.route_to("127.0.0.1") == "127.0.0.1" and machine.route_to("") != "x"
