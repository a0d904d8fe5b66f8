from sites import Site

from hpcddp.slurm import reservations

LINES = """\
ReservationName=course StartTime=1795000000 EndTime=1795090000 Duration=1-01:00:00 \
Nodes=g[1-2] NodeCnt=2 CoreCnt=96 Features=(null) PartitionName=gpu Flags=SPEC_NODES \
TRES=cpu=96 Users=ada,bob Groups=(null) Accounts=ml Licenses=(null) State=INACTIVE
ReservationName=maint StartTime=1794000000 EndTime=1794040000 Duration=11:06:40 \
Nodes=n[1-100] NodeCnt=100 PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES,ALL_NODES \
TRES=cpu=9600 Users=root Groups=(null) Accounts=(null) State=INACTIVE
"""


def test_reservations_in_the_order_of_their_start(site: Site) -> None:
    site.program("scontrol", f"cat <<'E'\n{LINES}E")
    maint, course = reservations.read()
    assert (maint.name, maint.maintenance, maint.hosts, maint.nodes) == ("maint", True, "", 100)
    assert (maint.start, maint.end, maint.partition) == (1794000000, 1794040000, "")
    assert (course.maintenance, course.hosts, course.partition) == (False, "g[1-2]", "gpu")
    assert (course.users, course.accounts) == (("ada", "bob"), ("ml",))


def test_no_reservation(site: Site) -> None:
    site.program("scontrol", "echo 'No reservations in the system'")
    assert reservations.read() == []
