"""The connections between the processes of an attempt, on its nodes.

``channel`` sends messages to a process of the same job that knows its secret, or of the same user;
``supervisor`` orders the parents of ranks, which outlive attempts, and ``supervised`` asks it.
It imports the root alone. ``launch.parent`` and ``attempt.host`` use it.
"""
