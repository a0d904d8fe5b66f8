"""Exit codes of a rank. The batch script itself leaves with 0 or 1."""

DONE = 0
FAILED = 1
STOPPED = 85  # saved, and left because it was asked to
HUNG = 86  # no step for too long
DIVERGED = 87  # the numbers went wrong; nothing was saved
FENCED = 88  # a newer attempt owns the run: nothing of this life may be written any more

TERMINATED, USR2, SIGKILLED = 128 + 15, 128 + 12, 128 + 9  # what a shell makes of a signal

PRIVATE = (STOPPED, HUNG, DIVERGED, FENCED)
