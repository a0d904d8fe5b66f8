import os
import sys
from pathlib import Path
from typing import Any

import pytest
from sites import record_run

from hpcddp.doctor import check_job, check_rank
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir, write_json
from hpcddp.spec import JobSpec, SoftwareSpec


def test_the_ranks_try_the_hosts_of_the_users_services() -> None:
    environ = {"AWS_ENDPOINT_URL": "http://store:9000", "WANDB_MODE": "offline"}
    assert check_job.layer(Layer(), environ).values["command"][-1] == "store:9000"


def test_the_ranks_check_the_python_of_the_jobs_own_software() -> None:
    words = ["python", "-m", "hpcddp.doctor.check_rank"]
    assert check_job.command(JobSpec(command=words))[0] == sys.executable
    own = JobSpec(command=words, software=SoftwareSpec(venv="/opt/venv"))
    assert check_job.command(own)[0] == "python"  # the ranks resolve it


def test_a_time_limit_of_the_user_stays() -> None:
    assert check_job.layer(Layer(), {}).values["slurm.time"] == check_job.LIMIT
    mine = Layer()
    mine.put("slurm.time", "0:02:00", "--time")
    assert check_job.layer(mine, {}).values["slurm.time"] == "0:02:00"


def measured(path: Path, moment: float, server: tuple[float, float], **job: Any) -> dict[str, Any]:
    """This machine beside a node whose results are of a moment; this one recorded the run at 5.

    Args:
        server: the times of both files.
    """
    run = RunDir(path / "doctor-1")
    run.path.mkdir()
    record_run(run, **job)
    write_json(check_rank.results(run), {"time": moment})
    for file, time in zip((run.job, check_rank.results(run)), server, strict=True):
        os.utime(file, (time, time))
    return check_job.results(run, {"torch": "2.9"}).get("here", {})


@pytest.mark.parametrize(
    ("moment", "server", "ahead"),
    [
        (65.0, (5.0, 65.0), 0.0),
        (35.0, (5.0, 65.0), 30.0),  # the node is behind
        (95.0, (5.0, 65.0), -30.0),
        (65.0, (105.0, 165.0), 0.0),  # the server is ahead
        (2.0, (5.0, 2.0), 3.0),  # files have the time of their writer: at least this
    ],
)
def test_the_clock_here_is_read_beside_that_of_the_node(
    tmp_path: Path, moment: float, server: tuple[float, float], ahead: float
) -> None:
    assert measured(tmp_path, moment, server)["clock"] == pytest.approx(ahead)


def test_versions_here_count_where_the_ranks_use_this_python(tmp_path: Path) -> None:
    for name, job, torch in (
        ("a", {}, "2.9"),
        ("b", {"spec": {"software": {"venv": "/v"}}}, None),
        ("c", {"backend": "local"}, None),
    ):
        (tmp_path / name).mkdir()
        assert measured(tmp_path / name, 65.0, (5.0, 65.0), **job).get("torch") == torch
