"""The entry point of `hpcddp` and of `python -m hpcddp`."""

from __future__ import annotations

import gc


def main() -> None:
    """Run the command line."""
    gc.set_threshold(100_000)  # collections would take a tenth of the start-up, and find nothing
    from hpcddp.cli import main

    main()


if __name__ == "__main__":
    main()
