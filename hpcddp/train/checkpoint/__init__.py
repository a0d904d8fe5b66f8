"""How a state is written whole, found again, and read by another number of ranks.

It imports ``parallel`` and the rooms below.
Others use ``snapshot`` (what is saved), ``checkpoint`` (what lies where), ``lease``, ``newest``,
``disk_retry`` and ``plainfile``.
"""
