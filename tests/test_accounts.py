import pytest
from sites import Site

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import accounts
from hpcddp.slurm.accounts import Association, Qos

USER = """\
ml|ml||long,normal|normal|10|||node=8,gres/gpu=32|cpu=640|gres/gpu=600000
ml|bio|gpu|normal||||1-00:00:00|||
"""
QOS = """\
normal||00:00:00|low|cluster||||gres/gpu=16||20|
low|DenyOnLimit,NoReserve|1-00:01:00||requeue|2-00:00:00|gres/gpu=1|node=4|mem=1T|5||cpu=100
"""


def test_what_a_user_may_use_and_its_limits(site: Site) -> None:
    site.program("sacctmgr", f"echo \"$@\" >asked; cat <<'E'\n{USER}E")
    ml, bio = accounts.associations("ada", "hpc")
    assert ml == Association(
        "ml", True, "", ("long", "normal"), "normal", 10, None, "",
        {"node": 8, "gres/gpu": 32}, {"cpu": 640}, {"gres/gpu": 600000},
    )  # fmt: skip
    assert (bio.account, bio.default, bio.partition) == ("bio", False, "gpu")
    assert (bio.qos, bio.default_qos, bio.max_wall) == (("normal",), "", "1-00:00:00")


def test_the_limits_of_each_qos(site: Site) -> None:
    site.program("sacctmgr", f"cat <<'E'\n{QOS}E")
    normal, low = accounts.qos()
    assert normal == Qos(
        "normal", preempts=("low",), user_tres={"gres/gpu": 16}, max_submit=20, grace=0
    )
    assert (low.flags, low.grace, low.preempt_mode) == (
        ("DenyOnLimit", "NoReserve"),
        86460,
        "REQUEUE",
    )
    assert (low.max_wall, low.min_tres, low.max_tres) == (
        "2-00:00:00",
        {"gres/gpu": 1},
        {"node": 4},
    )
    assert (low.user_tres, low.max_jobs, low.group_tres) == ({"mem": 1024**2}, 5, {"cpu": 100})


def test_a_slurm_without_accounting_says_so(site: Site) -> None:
    words = "You are not running a supported accounting_storage plugin"
    site.program("sacctmgr", f"echo '{words}' >&2; exit 1")
    with pytest.raises(SlurmUnreachable, match=words):
        accounts.qos()
