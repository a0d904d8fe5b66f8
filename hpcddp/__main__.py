"""The entry point of `hpcddp` and of `python -m hpcddp`."""

from __future__ import annotations

import gc


def main() -> None:
    """Run the command line."""
    gc.set_threshold(100_000)  # start-up makes no garbage: looking for it is a tenth of its time
    from hpcddp.cli import main

    main()


if __name__ == "__main__":
    main()
