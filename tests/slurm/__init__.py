"""Tests on a real Slurm, which the sandbox boots."""
