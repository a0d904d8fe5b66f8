"""What trackers were told of a run, read back."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from made import made_run
from sites import Site

from hpcddp.rundir import RunDir
from hpcddp.trackers.to_wandb import records


def files_of(run: RunDir) -> Any:
    """TensorBoard's own reader over the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(run: RunDir, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in files_of(run).Scalars(name)]


def text(run: RunDir, name: str) -> str:
    tensor = files_of(run).Tensors(f"{name}/text_summary")[-1].tensor_proto
    return str(tensor.string_val[0].decode())


def history(run: RunDir) -> list[tuple[str, dict[str, float]]]:
    """Of all files of W&B in their order: the run's id, and each line of its history."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, name = [], ""
    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = Record.FromString(data)
            name = record.run.run_id or name
            if record.WhichOneof("record_type") == "history":
                values = {x.nested_key[0]: json.loads(x.value_json) for x in record.history.item}
                found.append((name, values | {"_step": record.history.step.num}))
    return found


@pytest.fixture
def made(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    """A run of three attempts: the second came to step 260, and the third went on from 250."""
    monkeypatch.setenv("HOME", str(site.folder))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)

    def make(**more: Any) -> RunDir:
        secret = {"TOKEN": "a-secret"}
        run = made_run(site.runs, env=secret, train={"lr": 0.5}, **more)
        if (second := run.attempt(2).metrics).exists():
            lines = list(map(json.loads, second.read_text().splitlines()))
            for line in lines:  # what is taken again is seen by its loss
                if line["event"] == "train" and line["step"] > 250:
                    line["loss"] = 99.0
            second.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return make
