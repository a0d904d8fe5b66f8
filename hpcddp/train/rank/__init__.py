"""A rank: its device, its cores, its task, its position in the world.

It imports no other room of the train half.
Others use ``world`` (the process group), ``spread`` (its position in the mesh), ``cpus``
and ``task_module``.
"""
