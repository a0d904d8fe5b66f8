"""The means to draw on a terminal, which several commands share.

It imports ``observe`` and what is below.
The commands use ``pen`` (colours), ``screen`` (a live page), ``progress`` and ``log_lines``.
"""
