"""How a model is spread over the ranks: cut, pipelined, sharded, and made whole again.

It imports ``input`` and the rooms below.
Others use ``engine`` (one step under any strategy), ``model``, ``optim``, ``optim_state``,
``hooks`` and ``state_dict``.
"""
