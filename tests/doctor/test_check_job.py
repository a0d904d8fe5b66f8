import sys

from hpcddp.doctor import check_job
from hpcddp.planning.jobfile import Layer
from hpcddp.spec import JobSpec, SoftwareSpec


def test_the_hosts_that_trackers_and_stores_need_are_reached_for() -> None:
    environ = {
        "MLFLOW_TRACKING_URI": "https://mlflow.example",
        "AWS_ENDPOINT_URL": "http://store:9000",
        "WANDB_BASE_URL": "",
        "HF_ENDPOINT": "no address",
    }
    assert list(check_job.targets(environ)) == ["mlflow.example:443", "store:9000"]
    keys = {"WANDB_API_KEY": "x", "HF_TOKEN": "x", "HF_ENDPOINT": "https://mirror.example"}
    assert list(check_job.targets(keys)) == ["api.wandb.ai:443", "mirror.example:443"]


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
