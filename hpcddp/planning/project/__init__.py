"""What a user's folder holds: the scripts that train, and a job file for one of them.

It imports ``planning.jobfile`` and ``planning.key_schema``.
Others use ``project_look`` and ``new_job``.
"""
