"""The environment of a submitted job, without the variables of a job that submits it."""

from __future__ import annotations

from collections.abc import Mapping

# Ranks and bindings of the submitting job must not be taken for those of the new one.
LEAKING = (
    "SLURM_", "SBATCH_", "SRUN_", "PMI", "OMPI_", "TORCHELASTIC_", "MASTER_",
)  # fmt: skip
# The user's settings of an MPI, except those that an mpirun sets for its ranks.
SETTINGS = ("OMPI_MCA_", "PMIX_MCA_")
LEAKING_SETTINGS = ("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix")
LEAKING_NAMES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "CUDA_VISIBLE_DEVICES", "HPCDDP_RUN_DIR", "HPCDDP_ATTEMPT", "HPCDDP_DEADLINE", "HPCDDP_SIGNAL",
    "HPCDDP_FORKED", "HPCDDP_DASK", "HPCDDP_WORLD", "HPCDDP_SHELL",
    "HPCDDP_SUPERVISOR", "HPCDDP_SECRET", "HPCDDP_PROGRESS", "HPCDDP_HEARTBEAT",
}  # fmt: skip

# Set by a submitting run for its trackers, unless by the user.
TRACKING = ("WANDB_RUN_ID", "WANDB_RESUME", "COMET_EXPERIMENT_KEY")


def leaking(environ: Mapping[str, str]) -> list[str]:
    """The variables that must not reach a submitted job."""
    names = set(LEAKING_NAMES)
    if environ.get("WANDB_RUN_ID") == environ.get("TORCHELASTIC_RUN_ID"):
        names.update(TRACKING)
    names.update(name for name in environ if name.startswith(LEAKING))
    own = {n for n in names if n.startswith(SETTINGS) and not n.startswith(LEAKING_SETTINGS)}
    return [name for name in environ if name in names - own - {"SLURM_CONF"}]


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy without the variables of a submitting job."""
    drop = set(leaking(environ))
    return {name: value for name, value in environ.items() if name not in drop}
