"""The software of the ranks: modules, a Python environment or a container, as facts for a script.

It imports ``launch`` and the root.
Others use ``software_keys``, ``software_facts`` and ``software_checks``.
"""
