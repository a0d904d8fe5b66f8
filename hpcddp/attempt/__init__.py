"""Starts and ends an attempt on its host, and decides what follows.

It imports ``slurm`` and the root: the standard library alone, for Python 3.9 and later.
Others use ``ledger`` (the attempts), ``decision`` (causes and actions), ``joblog`` and
``log_reader`` (lines of a log), ``first_failure``, ``error_record``, ``exit_codes``,
``rank_exit``, ``fence``, ``rendezvous``, ``launch_facts``, ``sentry`` and ``lost_script``.
Its folder `nodes` checks the nodes of an attempt, and records what it met on them; `link` connects
its processes.
"""
