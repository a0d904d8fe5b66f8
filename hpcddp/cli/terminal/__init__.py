"""Output on a terminal, which several commands share.

It imports ``submit``, ``observe`` and what is below.
Others use ``screen`` (a live page), ``picture``, ``progress``, ``follow``, ``failure``, ``say``,
``sections``, ``shown``, ``tables`` and ``log_lines``.
"""
