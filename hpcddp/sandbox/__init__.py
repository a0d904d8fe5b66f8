"""A whole real Slurm on this machine, in one folder, and rehearsals of faults.

It imports ``observe`` and what is below.
Others use ``cluster``, ``rehearse`` and ``config``.
"""
