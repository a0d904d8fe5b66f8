"""MLflow: one run, found again by its id, or by its tag where the id was not recorded.

When the run is opened, MLflow is asked how far it has each metric. It gets later steps only, so
that no value is lost or doubled where the process was killed in between. A repeated step keeps the
value that was sent first, for MLflow takes nothing back.
"""

from __future__ import annotations

import hashlib
import os
import re
import time as clock
from collections.abc import Iterator, Mapping
from typing import Any

from hpcddp import record
from hpcddp.rundir import RunDir
from hpcddp.submit import status
from hpcddp.trackers import plain
from hpcddp.trackers.send import config

TAG = "hpcddp.run"
LONGEST = {"name": 250, "param": 6000, "tag": 5000}  # characters that MLflow takes
BATCH = {"metrics": 1000, "params": 100}  # in one request
ENDS = {"COMPLETED": "FINISHED", "STOPPED": "KILLED", "CANCELLED": "KILLED"}
# A server that does not answer is given up after some seconds; the library waits for minutes.
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}


def uri(run: RunDir) -> str:
    """Where runs are tracked: as the environment says, or in plain files beside the runs."""
    return os.environ.get("MLFLOW_TRACKING_URI") or str(run.path.parent / "mlruns")


def where(run: RunDir) -> str:
    """The same as a digest, since no file in a run dir may hold a password."""
    return hashlib.sha256(plain(uri(run)).encode()).hexdigest()[:16]


def knows(run: RunDir, memory: Mapping[str, Any]) -> bool:
    """Whether the run was made where it would be looked for now."""
    return memory.get("where") == where(run)


def open_sink(run: RunDir, memory: Mapping[str, Any]) -> Tracked:
    """Find the run, or make it."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # plain files need no database
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri(run))
    return Tracked(run, client, memory.get("run_id") or _find(run, client) or _make(run, client))


def _experiment(run: RunDir, client: Any) -> str:
    """The id of the experiment: the job's name, if the environment has no other."""
    from mlflow.exceptions import MlflowException

    if known := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return known
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or record.read(run).spec["name"]
    if (experiment := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run was first
            experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id)


def _find(run: RunDir, client: Any) -> str | None:
    """The id of a run that was made, but not recorded: its process was killed before."""
    matches = client.search_runs([_experiment(run, client)], f"tags.`{TAG}` = '{run.name}'")
    return str(matches[0].info.run_id) if matches else None


def _make(run: RunDir, client: Any) -> str:
    began = int(record.read(run).created * 1000)
    created = client.create_run(
        _experiment(run, client), start_time=began, tags={TAG: run.name}, run_name=run.name
    )
    return str(created.info.run_id)


class Tracked:
    """A run at MLflow."""

    def __init__(self, run: RunDir, client: Any, run_id: str) -> None:
        self.memory: dict[str, Any] = {"where": where(run), "run_id": run_id}
        self._run, self._client, self._id = run, client, run_id
        data = client.get_run(run_id).data
        self._sent = {metric.key: metric.step for metric in data._metric_objs}
        self._metrics: list[Any] = []
        self._send_config(data.params)

    def _send_config(self, known: Mapping[str, str]) -> None:
        """Send the job's values as parameters. MLflow does not change one that it has."""
        from mlflow.entities import Param

        values = {_name(name): str(value) for name, value in config(self._run).items()}
        new = [Param(n, v[: LONGEST["param"]]) for n, v in values.items() if n not in known]
        for part in _parts(new, BATCH["params"]):
            self._client.log_batch(self._id, params=part)

    def put(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """The values that it does not have."""
        from mlflow.entities import Metric

        for name, value in values.items():
            name = _name(name)
            if step > self._sent.get(name, -1):
                self._sent[name] = step
                self._metrics.append(Metric(name, value, int(time * 1000), step))

    def say(self, text: str) -> None:
        """The words as the run's description; its state too."""
        self._client.set_tag(self._id, "mlflow.note.content", text[-LONGEST["tag"] :])
        state = status.known(self._run)
        if not state.final:
            self._client.update_run(self._id, status="RUNNING")
        else:
            end = int(clock.time() * 1000)
            self._client.set_terminated(self._id, ENDS.get(state.state, "FAILED"), end)

    def flush(self) -> bool:
        """Send the values."""
        waiting, self._metrics = self._metrics, []
        for part in _parts(waiting, BATCH["metrics"]):
            self._client.log_batch(self._id, metrics=part)
        return True

    def close(self) -> None:
        """Nothing is open: each request stands for itself."""


def _name(name: str) -> str:
    """A name that MLflow takes: it may be a file's path in its store."""
    allowed = re.sub(r"[^\w\-. :/]", "_", name)
    parts = [part for part in allowed.split("/") if part.strip(".")]
    return "/".join(parts)[: LONGEST["name"]] or "_"


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
