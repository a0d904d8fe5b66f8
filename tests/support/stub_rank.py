"""A rank without torch that answers, and waits as its argument says."""

import ctypes
import os
import sys
import threading

from hpcddp.stacks.answer import answer


def hold_the_lock() -> None:
    """A call in C that keeps Python's lock, as a hanging extension does."""
    print("up", flush=True)
    while True:
        ctypes.PyDLL(None).sleep(600)


def wait_for_others() -> None:
    print("up", flush=True)
    threading.Event().wait(600)


def main() -> None:
    if sys.argv[1] == "forked":  # its parent had others
        os.environ |= {
            "HPCDDP_FORKED": "1",
            "HPCDDP_ATTEMPT": "2",
            "MASTER_PORT": "7",
            "NOTE": "a=b c",
        }
    if sys.argv[1] != "mute":
        answer(os.environ)
    hold_the_lock() if sys.argv[1] == "hold" else wait_for_others()


main()
