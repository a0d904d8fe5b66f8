from pathlib import Path

import pytest

from hpcddp.doctor import service_hosts

AWS, WANDB = "s3.amazonaws.com:443", "api.wandb.ai:443"


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        ({}, []),
        (
            {
                "MLFLOW_TRACKING_URI": "https://mlflow.example",
                "AWS_ENDPOINT_URL": "http://store:9000",
                "WANDB_BASE_URL": "",
                "HF_ENDPOINT": "no address",
            },
            ["mlflow.example:443", "store:9000"],
        ),
        ({"MLFLOW_TRACKING_URI": "http://mlflow.example"}, ["mlflow.example:80"]),
        (
            {"WANDB_API_KEY": "x", "HF_TOKEN": "x", "HF_ENDPOINT": "https://mirror.example"},
            [WANDB, "mirror.example:443"],
        ),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, []),
        ({"AWS_ACCESS_KEY_ID": "x"}, [AWS]),
        ({"AWS_PROFILE": "mine"}, [AWS]),
        ({"AWS_ACCESS_KEY_ID": "x", "AWS_ENDPOINT_URL_S3": "https://store"}, ["store:443"]),
        ({"AWS_PROFILE": "mine", "AWS_ENDPOINT_URL": "https://store"}, ["store:443"]),
    ],
)
def test_the_hosts_that_trackers_and_stores_need_are_named(
    tmp_path: Path, environ: dict[str, str], hosts: list[str]
) -> None:
    assert list(service_hosts.targets({"HOME": str(tmp_path), **environ})) == hosts


def test_a_login_of_wandb_counts_like_a_key(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine github.com login user password x\n")
    assert list(service_hosts.targets(home)) == []
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert list(service_hosts.targets(home)) == [WANDB]
    assert list(service_hosts.targets({**home, "WANDB_MODE": "offline"})) == []
    own = {**home, "WANDB_BASE_URL": "https://wandb.here"}
    assert list(service_hosts.targets(own)) == ["wandb.here:443"]


def test_a_store_in_the_configuration_of_aws_takes_the_place_of_aws(tmp_path: Path) -> None:
    config = tmp_path / ".aws" / "config"
    config.parent.mkdir()
    config.write_text("[profile lab]\nendpoint_url = https://ceph.example:8443\n")
    home = {"HOME": str(tmp_path)}
    assert list(service_hosts.targets({**home, "AWS_PROFILE": "lab"})) == ["ceph.example:8443"]
    assert list(service_hosts.targets({**home, "AWS_PROFILE": "other"})) == [AWS]
