"""Reports of a rank on itself: signs of life, times, metrics.

It imports ``rank`` and the rooms below.
Others use ``heartbeat``, ``watchdog``, ``metrics``, ``slow_ranks`` and ``timing``.
"""
