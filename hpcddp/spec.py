"""What was asked: JobSpec and its parts, as plain dataclasses.

The job file, the environment and the flags fill them (jobfile.py); the node reads them back from
the run dir's JSON. A key is declared here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcddp.keys import Keys, key


@dataclass
class TrainSpec:
    """How a step is taken."""

    lr: float = key(1e-3, "peak learning rate", least=0)
    weight_decay: float = key(0.01, "AdamW's weight decay", least=0)
    schedule: str = key("cosine", "learning rate after warm-up", choices=("constant", "cosine"))
    warmup_steps: int = key(0, "steps of linear warm-up", least=0)
    clip_norm: float = key(0.0, "largest gradient norm; 0 does not clip", least=0)
    micro_batch: int = key(0, "most samples of one forward pass on a rank; 0 for no limit", least=0)
    drop_last: bool = key(True, "leave out an epoch's incomplete last global batch")
    find_micro_batch: bool = key(
        False, "try at start-up which is the largest micro-batch that fits into memory"
    )
    precision: str = key(
        "fp32",
        "bf16 and fp16 by autocast; fp64 throughout",
        choices=("fp32", "bf16", "fp16", "fp64"),
    )
    tf32: bool = key(False, "float32 products with TF32's 10 bits, where a GPU has it")
    deterministic: bool = key(False, "algorithms that give the same bits in each run, or an error")
    recompute: bool = key(False, "keep no activations of a block but compute them again (slower)")
    compile: bool = key(False, "torch.compile the model")
    log_every: int = key(10, "steps between two metric lines", least=1)
    eval_every: int = key(1, "epochs between two evaluations; 0 for one at the end", least=0)
    hang_seconds: float = key(
        300.0, "least seconds without a step that count as a hang; 0 never looks", least=0
    )
    on_divergence: str = key(
        "stop",
        "answer to a loss that is no number or explodes",
        choices=("stop", "skip", "rollback"),
    )
    explode: float = key(
        1000.0, "times the first loss at which it counts as diverged; 0 never", least=0
    )
    measure: bool = key(False, "tell memory by part and bytes sent, with each metric line")
    trace: bool = key(False, "write every step's sample ids and loss, rank by rank")


@dataclass
class DdpSpec:
    """DistributedDataParallel's own options."""

    static_graph: bool = key(
        False, "the graph is the same in every step; a resume is not exact to the last bit"
    )
    find_unused_parameters: bool = key(False, "some parameters get no gradient in some steps")
    bucket_mb: int = key(
        0, "megabytes of gradients that travel together; 0 for torch's own choice", least=0
    )
    join: bool = key(False, "compute no padding where an epoch's last batch is uneven")
    hook: str = key(
        "none",
        "how gradients travel",
        choices=("none", "fp16", "bf16", "powersgd", "local_sgd"),
    )
    rank: int = key(1, "rank of PowerSGD's approximation", least=1)
    after: int = key(100, "steps with plain averages before powersgd or local_sgd begins", least=2)
    period: int = key(8, "steps between two averages of the weights under local_sgd", least=1)


@dataclass
class PipelineSpec:
    """How micro-batches go through the stages of a pipeline."""

    schedule: str = key("1f1b", "their order", choices=("gpipe", "1f1b", "interleaved"))
    chunks: int = key(0, "least micro-batches of a step; 0 for one per stage", least=0)


@dataclass
class DataSpec:
    """How samples are loaded."""

    workers: int = key(
        -1, "processes that read data for one rank; -1 chooses by its CPUs", least=-1
    )
    prefetch: int = key(2, "batches that each of them reads ahead", least=1)
    eval_batch: int = key(256, "samples of one forward pass in evaluation", least=1)
    on_bad: str = key(
        "stop", "what an image that cannot be read does: stop, or skip it", choices=("stop", "skip")
    )
    retry_seconds: float = key(
        240.0, "seconds that a store which does not answer is asked again", least=0
    )
    stage: list[str] = key(
        [], "files, folders and stores that each node copies to its own disk first", alone=True
    )
    cache: str = key("10G", "most bytes that a node keeps of what it fetched; 0 keeps nothing")


@dataclass
class MetricsSpec:
    """What is told of a run while it trains, and to whom."""

    ranks: bool = key(True, "figures of each rank, and the names of the slow ones")
    slow: float = key(1.5, "times the other ranks' median from which a rank is slow", least=1)
    trackers: list[str] = key(
        [], "who else gets the metrics", choices=("tensorboard", "mlflow", "wandb")
    )


@dataclass
class CheckpointSpec:
    """What is saved, and what is kept."""

    every: int = key(100, "steps between two checkpoints; 0 saves at the end only", least=0)
    keep: int = key(2, "newest checkpoints that are kept", least=1)
    best: str = key("loss", "evaluation metric whose best checkpoint is kept too; empty for none")
    best_mode: str = key("min", "which value of it is best", choices=("min", "max"))


@dataclass
class RequeueSpec:
    """When a job that ended comes back by itself. Preemptions and node failures always do."""

    enabled: bool = key(True, "come back by itself at all")
    crashes: int = key(3, "crashes without progress after which it stays ended", least=1)
    hangs: int = key(3, "hangs without progress after which it stays ended", least=1)
    timeouts: int = key(0, "time limits after which it stays ended; 0 for no limit", least=0)
    exclude_bad_nodes: bool = key(False, "come back on other nodes than the one that failed")


@dataclass
class JobSpec:
    """One training job, as asked."""

    name: str = key("", "the run's name; the job's by default")
    task: str = key("", "task module: a .py file beside the job file, or package.module:object")
    command: list[str] = key([], "what each rank runs in place of a task; also given after --")
    resume_command: list[str] = key([], "what it runs from the second attempt on; command if empty")
    start_seconds: float = key(
        0.0, "seconds in which a command's ranks must meet; 0 for no limit, and a word", least=0
    )
    snapshot: bool = key(True, "a command works on a copy of the code as it was at submission")
    snapshot_mb: int = key(100, "most megabytes of that copy", least=1)
    nodes: str = key("1", "nodes: a number, or a range such as 1-4")
    gpus: int = key(1, "GPUs (ranks) of one node", least=1)
    cluster: str = key("auto", "auto, local, slurm, or a cluster profile")
    template: str = key("", "script template; the cluster's by default")
    launcher: str = key("", "how processes start; the cluster's by default")
    strategy: str = key("ddp", "how the model is spread: ddp, fsdp, pp=2,ddp=4, ...")
    start_from: str = key("", "file of weights that a new run starts from; see hpcddp import")
    global_batch: int = key(32, "samples of one optimizer step, over all ranks", least=1)
    epochs: int = key(0, "passes over the training set; 0 for as many as max_steps takes", least=0)
    max_steps: int = key(0, "stop after this many optimizer steps; 0 for no limit", least=0)
    seed: int = key(0, "seed of weights, order and augmentation", least=0)
    train: TrainSpec = dataclasses.field(default_factory=TrainSpec)
    ddp: DdpSpec = dataclasses.field(default_factory=DdpSpec)
    pp: PipelineSpec = dataclasses.field(default_factory=PipelineSpec)
    data: DataSpec = dataclasses.field(default_factory=DataSpec)
    metrics: MetricsSpec = dataclasses.field(default_factory=MetricsSpec)
    checkpoint: CheckpointSpec = dataclasses.field(default_factory=CheckpointSpec)
    requeue: RequeueSpec = dataclasses.field(default_factory=RequeueSpec)
    model: dict[str, Any] = key({}, "keyword arguments of the task's model()")
    dataset: dict[str, Any] = key({}, "keyword arguments of the task's dataset()")
    slurm: dict[str, Any] = key({}, "sbatch options by their long names", scalar=True)
    env: dict[str, Any] = key({}, "environment variables of the job", scalar=True)


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
    },
)


def to_dict(spec: JobSpec) -> dict[str, Any]:
    """The spec as plain data, for the run dir's JSON."""
    return dataclasses.asdict(spec)


def from_dict(data: Mapping[str, Any], where: str = "job.json") -> JobSpec:
    """The spec that `to_dict` wrote."""
    return KEYS.load(data, where)
