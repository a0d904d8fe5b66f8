import pytest
from sites import Site

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import accounts
from hpcddp.slurm.accounts import Association, Qos

USER = """\
ml|ml||long,normal|normal|10|||node=8,gres/gpu=32|cpu=640|gres/gpu=600000|gres/gpu=4|
ml|bio|gpu|normal||||1-00:00:00|||||cpu=5000
"""
QOS = """\
normal||00:00:00|low|cluster||||gres/gpu=16||20||cpu=32|
low|DenyOnLimit,NoReserve|1-00:01:00||requeue|2-00:00:00|gres/gpu=1|node=4|mem=1T|5||cpu=100||gres/gpu=960
"""


def test_what_a_user_may_use_and_its_limits(site: Site) -> None:
    site.program("sacctmgr", f"echo \"$@\" >asked; cat <<'E'\n{USER}E")
    ml, bio = accounts.associations("ada", "hpc")
    assert ml == Association(
        "ml", True, "", ("long", "normal"), "normal", 10, None, "",
        {"node": 8, "gres/gpu": 32}, {"cpu": 640}, {"gres/gpu": 600000}, {"gres/gpu": 4},
    )  # fmt: skip
    assert (bio.account, bio.default, bio.partition) == ("bio", False, "gpu")
    assert (bio.qos, bio.default_qos, bio.max_wall) == (("normal",), "", "1-00:00:00")
    assert bio.max_minutes == {"cpu": 5000}


def test_the_limits_of_each_qos(site: Site) -> None:
    site.program("sacctmgr", f"cat <<'E'\n{QOS}E")
    normal, low = accounts.qos()
    assert normal == Qos(
        "normal",
        preempts=("low",),
        user_tres={"gres/gpu": 16},
        max_submit=20,
        grace=0,
        node_tres={"cpu": 32},
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
    assert low.max_minutes == {"gres/gpu": 960}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1-02:03:04", 93784), ("00:00:30", 30), ("", 0), ("UNLIMITED", 0), ("1-2-3", 0),
     ("N/A-", 0), ("x-00:01:00", 0)],
)  # fmt: skip
def test_a_time_that_slurm_writes_otherwise_is_none(text: str, number: int) -> None:
    assert accounts.seconds(text) == number


def test_a_slurm_without_accounting_says_so(site: Site) -> None:
    words = "You are not running a supported accounting_storage plugin"
    site.program("sacctmgr", f"echo '{words}' >&2; exit 1")
    with pytest.raises(SlurmUnreachable, match=words):
        accounts.qos()
