"""Spreads a model over the ranks: divided, pipelined, sharded, and saved in one form.

It imports ``input`` and the rooms below.
Others use ``engine`` (one step under any strategy), ``model``, ``optim``, ``optim_state``,
``hooks`` and ``state_dict``.
"""
