"""What a rank is: its device, its cores, its task, its place in the world.

It imports no other room of the train half.
Others use ``world`` (the process group), ``task_module`` and ``rank_exit``.
"""
