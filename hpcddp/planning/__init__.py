"""From what was asked to a checked Plan and its script.

It imports ``launch`` and what is below, and never torch.
Others use ``jobfile.load``, ``plan.plan`` and ``render.render``.
"""
