"""Data that a node keeps on its own disk, for all jobs that run there.

It imports the rooms below ``data``, and never torch.
Others use ``cache``, ``disk`` and ``leftovers``.
"""
