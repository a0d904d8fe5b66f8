"""The samples of a rank (``sampler``), their order, and how they are loaded.

It imports ``monitor`` and the rooms below.
Others use ``batches`` (the data of a task), ``loaders`` and ``seeding``.
"""
