"""Begins and ends an attempt on its host, and decides what follows.

It imports ``slurm`` and the root: the standard library alone, for Python 3.9 and later.
Others use ``ledger`` (the attempts), ``first_failure`` (why one ended) and ``error_record``.
"""
