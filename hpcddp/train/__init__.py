"""The train half: what runs in a rank.

Its rooms: `checkpoint`, `parallel`, `input`, `monitor`, `rank`.
It imports torch, ``data`` and what is below, and never click or jinja2.
Others use ``job.train`` (a rank in one attempt), ``loop`` and ``attach``, each inside a function.
"""
