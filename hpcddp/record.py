"""job.json: the checked job and where it runs. The plan half writes it; all others read it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hpcddp import JOB_FORMAT, __version__
from hpcddp.errors import RunError
from hpcddp.rundir import RunDir, read_json, write_json

TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "dict[str, Any]": dict,
    "list[int]": list,
    "list[str]": list,
    "dict[str, float]": dict,
}
ENDLESS = 1e11  # seconds since the epoch: where an older version recorded no time


@dataclass
class JobRecord:
    """One run's job.json."""

    run: str
    spec: dict[str, Any]  # JobSpec, by spec.to_dict
    nodes: list[int]  # fewest and most
    gpus_per_node: int
    backend: str
    workdir: str  # the folder of the submission, where the job works
    cluster: str = ""  # the profile's file
    launcher: str = ""
    launch: dict[str, Any] = field(default_factory=dict)  # see attempt/launch_facts.py
    host_suffix: str = ""  # of MASTER_ADDR
    poll_seconds: int = 30
    slurm_name: str = ""  # the job's name, if it is not the run's: in an array
    lead: int = 0  # seconds before the time limit at which Slurm sends a signal
    created: float = 0.0  # seconds since the epoch
    forced: list[str] = field(default_factory=list)  # keys that --sbatch set
    site_values: list[str] = field(default_factory=list)  # keys that the profile set
    # Nodes that the script excludes -> until when, in seconds since the epoch.
    left_out: dict[str, float] = field(default_factory=dict)
    container: dict[str, Any] = field(default_factory=dict)  # runtime; command: words that enter it
    version: str = __version__
    format: int = JOB_FORMAT

    @property
    def name(self) -> str:
        """The job's name at its backend."""
        return self.slurm_name or self.run

    @property
    def clusters(self) -> str:
        """The clusters that it was sent to; "" for that of the submitting shell."""
        return str(self.spec.get("slurm", {}).get("clusters", ""))

    @property
    def ranks_per_node(self) -> int:
        """Training processes per node: one per GPU, or one that uses all GPUs."""
        from hpcddp.strategy import processes  # not in host.pyz

        return processes(self.spec.get("strategy", "ddp"), self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Ranks on the most nodes."""
        return self.nodes[1] * self.ranks_per_node


def read(run: RunDir) -> JobRecord:
    """The record of a run.

    Raises:
        RunError: it is missing, damaged, or has another format.
    """
    data = read_json(run.job)
    if data is None:
        hint = "check the path; `hpcddp ls` lists the runs"
        raise RunError("there is no run here: job.json is missing", where=str(run.path), hint=hint)
    if data.get("format") != JOB_FORMAT:
        raise RunError(
            f"has format {data.get('format')}, expected {JOB_FORMAT}",
            where=str(run.job),
            hint="use the hpcddp that made the run",
        )
    if isinstance(data.get("left_out"), list):
        data["left_out"] = dict.fromkeys(data["left_out"], ENDLESS)
    try:
        record = JobRecord(**data)
    except TypeError as error:
        raise RunError(f"is damaged: {error}", where=str(run.job)) from None
    for f in dataclasses.fields(record):
        if not isinstance(getattr(record, f.name), TYPES[str(f.type)]):
            raise RunError(f"is damaged: {f.name}", where=str(run.job))
    if [type(n) for n in record.nodes] != [int, int]:
        raise RunError("is damaged: nodes", where=str(run.job))
    return record


def write(run: RunDir, record: JobRecord) -> None:
    """Write the record of a run."""
    data = dataclasses.asdict(record)
    for name in ("launch", "forced", "site_values", "left_out", "container"):
        if not data[name]:
            del data[name]  # older versions take an unknown key for damage
    write_json(run.job, data)
