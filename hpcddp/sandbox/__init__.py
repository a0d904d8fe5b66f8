"""A whole real Slurm on this machine, in one folder, and rehearsals of faults.

It imports ``observe`` and what is below.
The commands and the tests use ``cluster``, ``rehearse`` and ``faults``.
"""
