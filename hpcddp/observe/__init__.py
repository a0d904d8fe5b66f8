"""What became of a run, read from its folder, as plain data.

It imports ``submit`` and what is below; it writes nothing.
Others use ``view`` (a run as data), ``history``, ``curves`` and ``poll``.
"""
