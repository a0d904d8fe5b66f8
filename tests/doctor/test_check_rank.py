from pathlib import Path

from hpcddp.doctor import check_rank
from hpcddp.rundir import RunDir


def test_a_node_without_the_runs_folder_says_so_and_does_not_fail(tmp_path: Path) -> None:
    facts = check_rank._node(RunDir(tmp_path / "runs" / "doctor-1"), [])
    assert facts["folder"] == facts["writes"] == {}
