"""The nodes of an attempt: their checks at its start, what it met on them, and which to avoid.

``machine`` reads facts of this machine, ``node_check`` finds its faults, ``preflight`` checks all
nodes from the first one, ``bad_nodes`` names those that the next attempt avoids, and
``node_events`` records for later runs what happened on which node.
It imports ``attempt``, ``slurm`` and the root. Others use ``bad_nodes``, ``machine`` and
``node_events``.
"""
