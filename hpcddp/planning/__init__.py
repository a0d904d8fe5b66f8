"""From a job file and options to a checked Plan and its script.

It imports ``launch`` and the rooms below, and never torch.
Others use ``jobfile.load``, ``asked.Asked.read`` and ``plan.make``, in this order, and
``clusters``, ``earlier_runs``, ``code_files`` and ``advice``. Its folders `site`,
`project` and `script` say what a Slurm cluster is, what a user's folder holds, and how a script
was made; `software` says what the ranks run in, and `trust` which nodes a job avoids.
"""
