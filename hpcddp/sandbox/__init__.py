"""A whole real Slurm on this machine, in one folder, for people and for the tests."""
