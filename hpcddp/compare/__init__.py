"""Which strategy to take, and its cost: estimates, short trials, and advice.

It imports ``planning`` and the rooms below; torch only in a process of its own.
Others use ``recommend`` (estimates), ``strategy_cases`` and ``trial`` (trials), and
``model_query``.
"""
