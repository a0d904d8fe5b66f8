"""The connections between the processes of an attempt, on its nodes.

``channel`` sends messages to a process of the same job that knows its secret, or of the same user.
``parents`` knows which parents of ranks live, ``supervisor`` orders them, ``supervised`` asks it to
run an attempt, and ``slots`` are memory that ranks and their parent share.
It imports ``attempt`` and the root. Others use ``channel``, ``parents``, ``rank_lines`` and
``slots``.
"""
