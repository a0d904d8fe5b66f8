"""A rank's stack on request, on the rank's own node: the rank answers a signal, and is read there.

``answer`` makes a rank answer, ``rank_processes`` finds the ranks of an attempt on this node,
``stack_reader`` reads their stacks, ``rank_shell`` starts a shell in the environment of one.
It imports the root alone, and runs in host.pyz. Others use these four modules.
"""
