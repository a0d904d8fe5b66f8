"""How a state is written whole, found again, and read by another number of ranks.

It imports ``parallel`` and the rooms below.
Others use ``saver`` (when), ``checkpoint`` (what lies where) and ``plainfile``.
"""
