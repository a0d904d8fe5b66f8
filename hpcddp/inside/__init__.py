"""Into a running job: the stacks of its ranks, and a shell beside one.

It imports ``submit`` and the rooms below; it changes nothing in the job.
Others use ``all_stacks`` and ``job_shell``.
"""
