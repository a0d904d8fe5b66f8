"""MLflow: one run, found by its id, or by its tag where the id was not recorded.

When the run is opened, MLflow reports the last step of each metric, and only later steps are sent.
So no value is lost or duplicated if a process is killed. A repeated step keeps the value that was
sent first, because MLflow cannot replace values.
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
LONGEST = {"name": 250, "param": 6000, "tag": 5000}  # characters that MLflow accepts
BATCH = {"metrics": 1000, "params": 100}  # limits of one request
ENDS = {"COMPLETED": "FINISHED", "STOPPED": "KILLED", "CANCELLED": "KILLED"}
# Shorter than the library's own time limits of minutes, for a server that does not answer.
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}


def uri(run: RunDir) -> str:
    """The tracking URI: MLFLOW_TRACKING_URI, or a folder beside the runs."""
    return os.environ.get("MLFLOW_TRACKING_URI") or str(run.path.parent / "mlruns")


def where(run: RunDir) -> str:
    """A digest of the tracking URI: no file in a run folder may contain a password."""
    return hashlib.sha256(plain(uri(run)).encode()).hexdigest()[:16]


def knows(run: RunDir, memory: Mapping[str, Any]) -> bool:
    """Whether the run was made at the present tracking URI."""
    return memory.get("where") == where(run)


def open_sink(run: RunDir, memory: Mapping[str, Any]) -> Tracked:
    """Find or make the run."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # plain files need no database
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri(run))
    return Tracked(run, client, memory.get("run_id") or _find(run, client) or _make(run, client))


def _experiment(run: RunDir, client: Any) -> str:
    """The id of the experiment: that of the environment, or the one named after the job."""
    from mlflow.exceptions import MlflowException

    if known := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return known
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or record.read(run).spec["name"]
    if (experiment := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run has made it meanwhile
            experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id)


def _find(run: RunDir, client: Any) -> str | None:
    """The id of a run whose process was killed before it recorded the id."""
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
        self.place = plain(uri(run))
        self._run, self._client, self._id = run, client, run_id
        data = client.get_run(run_id).data
        self._sent = {metric.key: metric.step for metric in data._metric_objs}
        self._metrics: list[Any] = []
        self._send_config(data.params)

    def _send_config(self, known: Mapping[str, str]) -> None:
        """Send the job's values as parameters. MLflow cannot change existing ones."""
        from mlflow.entities import Param

        values = {_name(name): str(value) for name, value in config(self._run).items()}
        new = [Param(n, v[: LONGEST["param"]]) for n, v in values.items() if n not in known]
        for part in _parts(new, BATCH["params"]):
            self._client.log_batch(self._id, params=part)

    def put(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Add the values that MLflow does not have."""
        from mlflow.entities import Metric

        for name, value in values.items():
            name = _name(name)
            if step > self._sent.get(name, -1):
                self._sent[name] = step
                self._metrics.append(Metric(name, value, int(time * 1000), step))

    def say(self, text: str) -> None:
        """Set the run's description and state."""
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
        """Do nothing: each request is complete."""


def _name(name: str) -> str:
    """A name that MLflow accepts; in its file store a name is a path."""
    allowed = re.sub(r"[^\w\-. :/]", "_", name)
    parts = [part for part in allowed.split("/") if part.strip(".")]
    return "/".join(parts)[: LONGEST["name"]] or "_"


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
