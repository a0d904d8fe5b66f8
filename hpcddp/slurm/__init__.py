"""The only caller of Slurm's programs, and readers of their output.

It imports the root: the standard library alone, for Python 3.9 and later.
Others use ``commands`` (one function a program), ``rules`` of a site, its ``partitions``,
``node_kinds``, ``node_samples``, ``accounts`` and ``reservations``,
``sbatch`` before a submission, ``follow_up_jobs``, ``steps`` into a running job, the
``environment`` of a job, its ``time_limit``, ``other_clusters``, ``hostlist``,
``hostlist_writer`` and ``pending_reasons``.
"""
