import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from sites import CHECKOUT

from hpcddp.planning import clusters, key_schema
from hpcddp.spec import KEYS

JOB = key_schema.schema(KEYS, "job", {"nodes": ("string", "integer")})
CLUSTER = key_schema.schema(clusters.KEYS, "cluster")


@pytest.mark.parametrize("file", sorted((CHECKOUT / "jobs").glob("*.toml")), ids=lambda p: p.stem)
def test_each_shipped_job_is_valid(file: Path) -> None:
    jsonschema.validate(tomllib.loads(file.read_text()), JOB)


@pytest.mark.parametrize("name", ["slurm", "local"])
def test_each_shipped_profile_is_valid(name: str) -> None:
    file = CHECKOUT / "templates" / "clusters" / f"{name}.toml"
    jsonschema.validate(tomllib.loads(file.read_text()), CLUSTER)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (JOB, {"nodes": 2, "gpus": 4, "train": {"lr": 0.1}, "slurm": {"mem": "64G"}}),
        (JOB, {"command": ["python", "train.py"], "device": "cpu"}),
        (JOB, {"metrics": {"trackers": ["wandb"]}}),
        (JOB, {"software": {"modules": ["a"], "container": {"image": "/a.sif", "gpus": "none"}}}),
        (CLUSTER, {"gpu_option": "gres", "env": {"A": 1}}),
    ],
)
def test_what_hpcddp_accepts_is_valid(schema: dict[str, Any], values: dict[str, Any]) -> None:
    jsonschema.validate(values, schema)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (JOB, {"gpuz": 4}),
        (JOB, {"software": {"container": {"runtime": "docker"}}}),
        (JOB, {"gpus": 0}),
        (JOB, {"train": {"learning_rate": 0.1}}),
        (JOB, {"device": "tpu"}),
        (JOB, {"slurm": {"mem": [1]}}),
        (CLUSTER, {"gpu_option": "gpus"}),
    ],
)
def test_what_hpcddp_refuses_is_invalid(schema: dict[str, Any], values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema)


def test_each_key_is_explained() -> None:
    assert (
        JOB["properties"]["train"]["properties"]["lr"]["description"] == KEYS.rows["train.lr"].text
    )
    assert JOB["properties"]["global_batch"]["default"] == 32
