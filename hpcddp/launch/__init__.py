"""How the processes of a job start on a node, and what each finds there.

It imports what is below; torch only in a function of a process that forks ranks.
Scripts start ``command`` in a rank. Others use ``launchers`` (the table) and ``script``.
"""
