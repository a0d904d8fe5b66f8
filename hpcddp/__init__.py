"""hpcddp: distributed PyTorch training on Slurm, and the same command anywhere else."""

__version__ = "0.1.0"
