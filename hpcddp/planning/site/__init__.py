"""What a Slurm cluster is: read from Slurm, kept beside its profile, and turned into a profile.

It imports ``planning.clusters``, ``slurm`` and the root.
Others use ``detected``, ``choices``, ``site_facts``, ``node_choice``, ``local_disks`` and
``profile_check``.
"""
