"""NCCL or RCCL and its network plugin, from the files of an environment."""

import sys
from pathlib import Path

import pytest

from hpcddp.doctor import here

ROCM = "__version__ = '2.9'\ncuda: str | None = None\nhip: str | None = '6.4.1'\n"
CUDA = "__version__ = '2.9'\ncuda: str | None = '13.0'\nhip: str | None = None\n"


def facts(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> dict[str, str]:
    """The rows about a torch in a folder of packages."""
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(version)
    (folder / "torch" / "lib" / "librccl.so").write_bytes(
        bytes(9000) + b"RCCL version : 2.22.3-HEAD\0"
    )
    for path in ("nvidia/net/lib/libnccl-net-ofi.so.0", "fabric/librccl-net.so"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder}/none::{folder}/fabric")
    return dict(here._torch("2.9"))


def test_a_torch_for_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = facts(tmp_path, monkeypatch, ROCM)
    assert rows["torch"] == "2.9, ROCm 6.4.1, RCCL 2.22.3"
    plugins = f"{tmp_path}/fabric/librccl-net.so, {tmp_path}/nvidia/net/lib/libnccl-net-ofi.so.0"
    assert rows["net plugin"] == plugins


def test_a_torch_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = facts(tmp_path, monkeypatch, CUDA)
    assert rows["torch"].startswith("2.9, CUDA 13.0, NCCL")
    assert rows["net plugin"] == f"{tmp_path}/nvidia/net/lib/libnccl-net-ofi.so.0"


def test_a_torch_without_gpus_has_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(tmp_path, monkeypatch, "cuda: str = None\n") == {"torch": "2.9, CPU only"}
