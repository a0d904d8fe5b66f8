"""``python -m hpcddp.data pack SOURCE TARGET``: a folder of images as tar shards."""

from __future__ import annotations

import argparse
import sys

from hpcddp.data.packing import pack
from hpcddp.errors import HpcddpError


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpcddp.data")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "Write a folder of images as tar shards."
    packs = commands.add_parser("pack", help=text, description=text)
    packs.add_argument("source", metavar="SOURCE", help="Folder or URL of CLASS/NAME.jpg files.")
    packs.add_argument("target", metavar="FOLDER", help="New local folder for the shards.")
    packs.add_argument(
        "--size", metavar="SIZE", default="100M", help="Approximate size of a shard (100M)."
    )
    packs.add_argument(
        "--seed", metavar="N", type=int, default=0, help="Random seed of the images' order (0)."
    )
    given = parser.parse_args(words)
    try:
        count = pack(given.source, given.target, given.size, seed=given.seed)
    except HpcddpError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    print(f"{count} shard{'s' * (count != 1)} in {given.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
