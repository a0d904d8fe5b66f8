"""A callback that saves and resumes a transformers Trainer with its run.

It is for the Trainer what ``hpcddp.attach`` is for your own training loop::

    from hpcddp.transformers import Preemptible

    trainer = transformers.Trainer(..., callbacks=[Preemptible()])

The run's checkpoints are the Trainer's own, in the run's folder. The run saves and stops between
two optimizer steps, when the Trainer has also logged and evaluated. ``trainer.train()`` resumes at
the exact batch. Outside a job the callback does nothing.

It imports ``train``, and transformers at its top. No other room uses it: users' scripts do.
"""

from hpcddp.transformers.callback import Preemptible

__all__ = ["Preemptible"]
