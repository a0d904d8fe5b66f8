"""The keys of a job: JobSpec and its parts, as plain dataclasses.

The job file, the environment and the options fill them (jobfile.py); the nodes read them from the
run folder's job.json. Each key of a job is declared here, and only here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcddp.keys import Keys, key

RUNTIMES = ("apptainer", "singularity", "charliecloud", "pyxis", "enroot", "podman-hpc", "shifter")


@dataclass
class TrainSpec:
    """Optimization: step, precision, logging and evaluation."""

    lr: float = key(1e-3, "peak learning rate", least=0)
    weight_decay: float = key(0.01, "weight decay of AdamW", least=0)
    schedule: str = key(
        "cosine", "course of the learning rate after warm-up", choices=("constant", "cosine")
    )
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", least=0)
    clip_norm: float = key(
        0.0, "gradient norm above which gradients are clipped; 0 for no clipping", least=0
    )
    micro_batch: int = key(0, "most samples of a rank's forward pass; 0 for no limit", least=0)
    drop_last: bool = key(True, "drop the incomplete last global batch of an epoch")
    find_micro_batch: bool = key(
        False, "find the largest micro-batch that fits in memory, by trying at the start"
    )
    precision: str = key(
        "fp32",
        "floating-point precision; bf16 and fp16 use autocast",
        choices=("fp32", "bf16", "fp16", "fp64"),
    )
    tf32: bool = key(False, "use TF32 for float32 matrix products, on GPUs that have it")
    deterministic: bool = key(
        False, "use deterministic algorithms only; an operation without one is an error"
    )
    recompute: bool = key(
        False, "recompute the activations of each block in the backward pass: less memory, slower"
    )
    compile: bool = key(False, "compile the model with torch.compile")
    log_every: int = key(10, "optimizer steps between two metric records", least=1)
    eval_every: int = key(
        1, "epochs between two evaluations; 0 for one evaluation, at the end", least=0
    )
    hang_seconds: float = key(
        300.0, "shortest time without a step that counts as a hang, in s; 0 for no check", least=0
    )
    on_divergence: str = key(
        "stop",
        "reaction to a loss that is nan, infinite or above train.explode",
        choices=("stop", "skip", "rollback"),
    )
    explode: float = key(
        1000.0,
        "factor on the first loss above which training has diverged; 0 for no check",
        least=0,
    )
    measure: bool = key(False, "record memory use by part and bytes sent, with each metric record")
    trace: bool = key(False, "record the sample ids and the loss of each step, for each rank")


@dataclass
class DdpSpec:
    """Options of DistributedDataParallel."""

    static_graph: bool = key(
        False, "the graph is the same in each step; then a resume may differ in the last bit"
    )
    find_unused_parameters: bool = key(False, "some parameters may get no gradient in a step")
    bucket_mb: int = key(0, "size of a gradient bucket, in MB; 0 for torch's default", least=0)
    join: bool = key(False, "use DDP's join for an uneven last batch, in place of padding")
    hook: str = key(
        "none",
        "communication hook: how ranks exchange gradients",
        choices=("none", "fp16", "bf16", "powersgd", "local_sgd"),
    )
    rank: int = key(1, "rank of the PowerSGD approximation", least=1)
    after: int = key(
        100, "optimizer steps with plain averages before powersgd or local_sgd starts", least=2
    )
    period: int = key(
        8, "optimizer steps between two averages of the weights under local_sgd", least=1
    )


@dataclass
class PipelineSpec:
    """Options of a pipeline (strategy pp)."""

    schedule: str = key(
        "1f1b", "order of micro-batches in the pipeline", choices=("gpipe", "1f1b", "interleaved")
    )
    chunks: int = key(0, "fewest micro-batches of a step; 0 for one per stage", least=0)


@dataclass
class DataSpec:
    """Loading of samples, and where data lies."""

    workers: int = key(
        -1, "data loader processes per rank; -1 chooses by the rank's CPUs", least=-1
    )
    prefetch: int = key(2, "batches that each data loader process reads ahead", least=1)
    eval_batch: int = key(256, "samples of a rank's forward pass in evaluation", least=1)
    on_bad: str = key("stop", "reaction to an unreadable image", choices=("stop", "skip"))
    retry_seconds: float = key(
        240.0, "how long to retry a store that does not answer, in s", least=0
    )
    stage: list[str] = key(
        [], "files, folders and store URLs to copy to each node's disk before training", alone=True
    )
    cache: str = key(
        "10G", "size of a node's disk cache for data from stores, such as 10G; 0 for none"
    )


@dataclass
class MetricsSpec:
    """Metrics of a run, and where they are sent."""

    ranks: bool = key(True, "record metrics of each rank, and name slow ranks")
    slow: float = key(
        1.5, "factor on the other ranks' median step time from which a rank is slow", least=1
    )
    trackers: list[str] = key(
        [], "trackers that get the metrics", choices=("tensorboard", "mlflow", "wandb")
    )


@dataclass
class CheckpointSpec:
    """Saving and keeping of checkpoints."""

    every: int = key(100, "optimizer steps between two checkpoints; 0 for one at the end", least=0)
    keep: int = key(2, "number of newest checkpoints to keep", least=1)
    best: str = key("loss", "evaluation metric whose best checkpoint is also kept; empty for none")
    best_mode: str = key(
        "min", "whether the smallest or the largest value is best", choices=("min", "max")
    )


@dataclass
class RequeueSpec:
    """When a job is requeued. After a preemption or a node failure it always is, if enabled."""

    enabled: bool = key(True, "whether the job may be requeued")
    crashes: int = key(
        3, "crashes in a row without progress after which the job stays ended", least=1
    )
    hangs: int = key(3, "hangs in a row without progress after which the job stays ended", least=1)
    timeouts: int = key(
        0,
        "time limits after which the job stays ended; 0: three in a row without progress",
        least=0,
    )
    exclude_bad_nodes: bool = key(False, "keep the job off nodes that failed")
    heartbeat_seconds: float = key(
        10.0, "seconds without a sign of life after which a node is lost; 0 for no limit", least=0
    )
    here: bool = key(True, "restart failed ranks on the same nodes, without a requeue")


@dataclass
class ContainerSpec:
    """The container in which the ranks run; the batch script stays outside."""

    image: str = key("", "image: a file, a folder, or a name that the runtime knows")
    runtime: str = key("apptainer", "program that runs the image", choices=RUNTIMES)
    python: str = key("python3", "Python of the image, 3.11 or later, with torch")
    binds: list[str] = key(
        [], "more folders to bind, as SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro", alone=True
    )
    gpus: str = key("nvidia", "GPUs to make visible", choices=("nvidia", "rocm", "none"))


@dataclass
class SoftwareSpec:
    """Programs and libraries of the ranks, prepared on the first node in this order."""

    purge: bool = key(False, "run `module purge` first")
    modules: list[str] = key([], "environment modules to load", alone=True)
    setup: list[str] = key([], "lines of shell to run after that; one that fails ends the attempt")
    conda: str = key("", "name or path of a conda environment whose Python the ranks use")
    venv: str = key("", "folder of a virtual environment whose Python the ranks use")
    uv: str = key("", "folder of a uv project; the ranks use the Python of its .venv")
    container: ContainerSpec = dataclasses.field(default_factory=ContainerSpec)

    @property
    def own_python(self) -> bool:
        """Whether the ranks use another Python than that of hpcddp."""
        return bool(self.conda or self.venv or self.uv or self.container.image)

    @property
    def own_programs(self) -> bool:
        """Whether the ranks may have programs that this machine does not have."""
        return bool(self.own_python or self.modules or self.setup)


@dataclass
class JobSpec:
    """One training job."""

    name: str = key("", "name of the run; by default that of the job file")
    task: str = key("", "task: a .py file beside the job file, or package.module:object")
    command: list[str] = key(
        [], "command that each rank runs in place of a task; also written after --"
    )
    resume_command: list[str] = key(
        [], "command from the second attempt on; empty for the same command"
    )
    start_seconds: float = key(
        0.0,
        "time for a command's ranks to start a process group, in s; 0 warns after 300 s",
        least=0,
    )
    snapshot: bool = key(True, "run a command on a code snapshot, made at submission")
    snapshot_mb: int = key(100, "largest code snapshot, in MB", least=1)
    nodes: str = key("1", "number of nodes, or a range such as 1-4")
    spares: int = key(0, "more nodes, each to replace a lost one without a requeue", least=0)
    gpus: int = key(
        1, "GPUs per node, one rank each; without GPUs, the processes per node", least=1
    )
    total_gpus: int = key(
        0, "GPUs of the whole job, divided over its nodes; 0 to set gpus instead", least=0
    )
    gpu_type: str = key("", "GPU type to request, such as a100; by default that of the cluster")
    device: str = key(
        "auto", "device of the ranks: their GPUs if there are any, or CPUs", choices=("auto", "cpu")
    )
    cluster: str = key(
        "auto", "cluster: auto, local, slurm, or the name or path of a cluster profile"
    )
    template: str = key("", "script template; by default that of the cluster")
    launcher: str = key("", "launcher of the ranks; by default the cluster's, or fork for a task")
    preflight: str = key(
        "light",
        "checks of the nodes when a job on several starts: for faults, also measurements, or none",
        choices=("light", "full", "off"),
    )
    strategy: str = key("ddp", "how the ranks share the model, such as ddp, fsdp or pp=2,ddp=4")
    start_from: str = key(
        "", "file of weights that a new run starts from, as `hpcddp export` writes it"
    )
    global_batch: int = key(32, "samples of one optimizer step, over all ranks", least=1)
    epochs: int = key(0, "passes over the training set; 0 for as many as max_steps needs", least=0)
    max_steps: int = key(0, "optimizer steps after which training ends; 0 for no limit", least=0)
    seed: int = key(0, "random seed of weights, data order and augmentation", least=0)
    train: TrainSpec = dataclasses.field(default_factory=TrainSpec)
    ddp: DdpSpec = dataclasses.field(default_factory=DdpSpec)
    pp: PipelineSpec = dataclasses.field(default_factory=PipelineSpec)
    data: DataSpec = dataclasses.field(default_factory=DataSpec)
    metrics: MetricsSpec = dataclasses.field(default_factory=MetricsSpec)
    checkpoint: CheckpointSpec = dataclasses.field(default_factory=CheckpointSpec)
    requeue: RequeueSpec = dataclasses.field(default_factory=RequeueSpec)
    software: SoftwareSpec = dataclasses.field(default_factory=SoftwareSpec)
    model: dict[str, Any] = key({}, "arguments of the task's model() function")
    dataset: dict[str, Any] = key({}, "arguments of the task's dataset() function")
    slurm: dict[str, Any] = key({}, "sbatch options, by their long names", scalar=True)
    env: dict[str, Any] = key({}, "environment variables of the job", scalar=True)

    @property
    def own_programs(self) -> bool:
        """Whether the job's PATH on a node differs from that of this machine."""
        return self.software.own_programs or "PATH" in self.env


KEYS = Keys(
    JobSpec,
    {
        "train": TrainSpec,
        "ddp": DdpSpec,
        "pp": PipelineSpec,
        "data": DataSpec,
        "metrics": MetricsSpec,
        "checkpoint": CheckpointSpec,
        "requeue": RequeueSpec,
        "software": SoftwareSpec,
        "software.container": ContainerSpec,
    },
)


def to_dict(spec: JobSpec) -> dict[str, Any]:
    """The spec as plain data, for job.json."""
    return dataclasses.asdict(spec)


def from_dict(data: Mapping[str, Any], where: str = "job.json") -> JobSpec:
    """The spec that `to_dict` wrote."""
    return KEYS.load(data, where)
