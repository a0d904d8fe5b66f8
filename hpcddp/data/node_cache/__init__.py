"""Samples that a node keeps on its own disk, for all jobs that run there.

It imports the modules of ``data`` that read, and never torch.
Others use ``cache``.
"""
