"""The software of the ranks: modules, a Python environment or a container, as facts for a script.

It imports the root alone.
Others use ``software_keys`` and ``software_facts``.
"""
