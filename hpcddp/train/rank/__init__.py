"""A rank: its device, its cores, its task, its place in the world.

It imports no other room of the train half.
Others use ``world`` (the process group) and ``task_module``.
"""
