"""The first comment of a script: how it was made, and what it runs.

It imports the root.
Others use ``header``.
"""
