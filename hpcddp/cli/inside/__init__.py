"""Commands that go into a running job.

It imports ``inside`` and the rooms below.
Others use its commands alone.
"""
