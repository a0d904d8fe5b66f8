"""Which nodes the user's runs have had trouble with, and which of them a new job avoids.

``node_history`` keeps one small file for each node beside the cluster's profile, ``node_book``
gathers into them what runs have recorded, and ``left_out`` chooses the nodes that a job avoids.
It imports ``planning``, ``attempt`` and the rooms below. Others use ``node_book``.
"""
