"""Comparison of strategies: estimates of their cost, short trials, and a recommendation.

It imports ``planning`` and the rooms below; torch only in a process of its own.
Others use ``recommend`` (estimates), ``strategy_cases`` and ``trial`` (trials), and
``model_query``.
"""
