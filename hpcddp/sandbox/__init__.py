"""A real Slurm on this machine, in one folder, and rehearsals of faults.

It imports ``observe`` and the rooms below.
Other rooms use ``cluster``, ``rehearse`` and ``config``.
"""
