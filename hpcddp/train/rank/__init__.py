"""A rank: its device, its cores, its task, its place in the world.

It imports no other room of the train half.
Others use ``world`` (the process group), ``spread`` (its place in the mesh), ``cpus``
and ``task_module``.
"""
