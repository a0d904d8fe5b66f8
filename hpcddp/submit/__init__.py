"""From a checked plan to a job id: the run folder, the code snapshot, the submission.

It imports ``compare``, ``planning`` and the rooms below.
Others use ``submission``, ``status``, ``run_jobs``, ``run_list``, ``prepare`` and ``times``.
"""
