"""Checkpoints: written completely or not at all, and read by any number of ranks.

It imports ``parallel`` and the rooms below.
Others use ``snapshot`` (the saved state), ``checkpoint`` (the files), ``lease``, ``newest``,
``disk_retry`` and ``plainfile``.
"""
