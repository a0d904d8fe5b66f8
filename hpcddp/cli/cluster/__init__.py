"""Commands about clusters: what one is, and whether a profile fits it.

It imports ``planning`` and the rooms below.
Others use its commands alone.
"""
