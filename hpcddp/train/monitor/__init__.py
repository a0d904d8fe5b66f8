"""What a rank tells of itself: signs of life, times, metrics.

It imports ``rank`` and what is below.
Others use ``heartbeat``, ``watchdog``, ``metrics`` and ``timing``.
"""
