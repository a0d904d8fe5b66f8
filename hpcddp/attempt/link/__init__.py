"""The connections between the processes of an attempt, on its nodes.

``channel`` sends messages to a process of the same job that knows its secret, or of the same user.
It imports the root alone. ``launch`` and ``attempt.host`` use it.
"""
