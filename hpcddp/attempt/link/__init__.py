"""The connections between the processes of an attempt, on its nodes.

``channel`` sends messages to a process of the same job that knows its secret, or of the same user.
``parents`` knows which parents of ranks live, ``supervisor`` orders them, ``supervised`` asks it to
run an attempt, and ``progress`` has the steps of a node's ranks.
It imports the root alone. ``launch.parent`` and ``attempt.host`` use it.
"""

PARENT = "hpcddp-parent"  # the name of a parent's process, in ps
