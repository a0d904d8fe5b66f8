"""A check-up of this machine and of some nodes: what would make a job fail or crawl.

It imports ``submit`` and the rooms below; torch only in the ranks of its own job (``check_rank``).
Others use ``here``, ``check_job``, ``diagnosis`` and ``node_summary``.
"""
