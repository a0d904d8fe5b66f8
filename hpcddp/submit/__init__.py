"""From a checked plan to a job id: the run's folder, its code, its script at Slurm.

It imports ``compare``, ``planning`` and the rooms below.
Others use ``submission`` (submit, resume, cancel), ``status``, ``run_jobs`` and ``prepare``.
"""
