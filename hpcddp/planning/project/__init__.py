"""What a user's folder holds: the scripts that train, a job file for one of them, and its code.

It imports ``planning.jobfile``, ``planning.key_schema`` and ``planning.code_files``.
Others use ``project_look``, ``new_job`` and ``code_checks``.
"""
