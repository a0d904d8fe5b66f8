"""Exit codes of a rank. The batch script itself leaves with 0 or 1."""

DONE = 0
FAILED = 1
STOPPED = 85  # saved and left after a stop request
HUNG = 86  # no step for too long
DIVERGED = 87  # the numbers went wrong; nothing was saved
FENCED = 88  # superseded by a newer attempt

TERMINATED, USR2, SIGKILLED = 128 + 15, 128 + 12, 128 + 9  # as a shell reports signals

PRIVATE = (STOPPED, HUNG, DIVERGED, FENCED)
ALONE = (STOPPED, DIVERGED, FENCED)  # after these, no other rank saves its step
