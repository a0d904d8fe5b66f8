from hpcddp.doctor import check_job
from hpcddp.planning.jobfile import Layer


def test_the_hosts_that_trackers_and_stores_need_are_reached_for() -> None:
    environ = {
        "MLFLOW_TRACKING_URI": "https://mlflow.example",
        "AWS_ENDPOINT_URL": "http://store:9000",
        "WANDB_BASE_URL": "",
        "HF_ENDPOINT": "no address",
    }
    assert list(check_job.targets(environ)) == ["mlflow.example:443", "store:9000"]


def test_a_time_limit_of_the_user_stays() -> None:
    assert check_job.layer(Layer(), {}).values["slurm.time"] == check_job.LIMIT
    mine = Layer()
    mine.put("slurm.time", "0:02:00", "--time")
    assert check_job.layer(mine, {}).values["slurm.time"] == "0:02:00"
