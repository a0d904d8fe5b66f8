"""A rank's reports: progress, hangs, times, metrics.

It imports ``rank`` and the rooms below.
Others use ``heartbeat``, ``watchdog``, ``metrics``, ``slow_ranks``, ``timing``, ``trace``.
"""
