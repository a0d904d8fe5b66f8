"""What the commands share to draw on a terminal.

It imports ``observe`` and what is below.
The commands use ``pen`` (colours), ``screen`` (a live page), ``progress`` and ``log_lines``.
"""
