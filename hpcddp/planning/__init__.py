"""From a job file and options to a checked Plan and its script.

It imports ``launch`` and the rooms below, and never torch.
Others use ``jobfile.load``, ``asked.Asked.read`` and ``plan.make``, in this order, and
``earlier_runs``, ``code_files`` and ``advice``.
"""
