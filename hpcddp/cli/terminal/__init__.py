"""The means to draw on a terminal, which several commands share.

It imports ``observe`` and what is below.
Others use ``screen`` (a live page), ``picture``, ``progress``, ``shown`` and ``log_lines``.
"""
