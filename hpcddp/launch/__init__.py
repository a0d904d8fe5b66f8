"""How the processes of a job start on a node, and their environment.

It imports the rooms below; torch only in a function of a process that forks ranks.
Scripts start ``command`` in a rank. Others use ``launchers`` (the table) and ``script``.
"""
