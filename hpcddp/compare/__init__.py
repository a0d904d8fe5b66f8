"""Which strategy, and what it takes: estimates, short trials, and advice.

It imports ``planning`` and what is below; torch only in a process of its own.
Others use ``recommend``, ``memory_estimate`` and ``trial``.
"""
