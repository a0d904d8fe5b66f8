"""The state and the history of a run, read from its folder, as plain data.

It imports ``submit`` and the rooms below; it writes nothing.
Other rooms use ``viewer`` (it fills in a ``view``), ``history``, ``curves``,
``series``, ``run_facts`` and ``poll``.
"""
