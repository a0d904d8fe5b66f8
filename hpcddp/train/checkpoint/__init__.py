"""How a state is written whole, found again, and read by another number of ranks.

It imports ``parallel`` and what is below.
Others use ``saver`` (when), ``checkpoint`` (what lies where) and ``plainfile``.
"""
