"""Disk quotas: outputs as in the examples of quota(1) and lfs-quota(1)."""

from pathlib import Path

import pytest
from sites import Site

from hpcddp.doctor import quotas
from hpcddp.doctor.quotas import Quota

KB = 1024
QUOTA = """\
Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nfs:/home  95000*  90000  100000   6days    1000       0       0
nfs:/proj  10  0  0    10  0  0
nfs:/data  10  0  200    99  100  0
"""
LFS = """\
Disk quotas for usr 1000 (uid 1000):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/a/rather/long/name/of/a/file/system
                [1024]       0    2048       -      10       0    1000       -
uid 1000 is using default file quota setting
"""


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (QUOTA, [Quota("nfs:/home", 95000 * KB, 90000 * KB, 1000, 0),
                 Quota("nfs:/data", 10 * KB, 200 * KB, 99, 100)]),
        (LFS, [Quota("/a/rather/long/name/of/a/file/system", KB * KB, 2048 * KB, 10, 1000)]),
        ("Disk quotas for user ada (uid 1000): none\n", []),
        ("lfs quota: cannot resolve mount point\n", []),
    ],
)  # fmt: skip
def test_quotas_are_read(text: str, rows: list[Quota]) -> None:
    assert list(quotas.parse(text)) == rows


def test_what_is_nearly_used_up_is_found(site: Site) -> None:
    site.program("quota", f"cat <<'E'\n{QUOTA}E\nexit 1")
    site.program("lfs", "echo 'no quota here' >&2; exit 1")
    rows = quotas.read(Path("/"))
    assert [row.what for row in quotas.findings(rows)] == [
        "92.8M of a quota of 87.9M are used on nfs:/home",
        "99 of a quota of 100 files are used on nfs:/data",
    ]


def test_a_program_that_hangs_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "TIMEOUT", 0.2)
    site.program("quota", "exec sleep 60")
    assert quotas.read(Path("/")) == []
