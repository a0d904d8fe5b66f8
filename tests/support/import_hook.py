"""What a statement imports, seen by a hook in a process of its own."""

import subprocess
import sys

HEAVY = {"torch", "numpy", "submitit", "rich", "sklearn"}

# Runs one command and tells what was asked for on the way, found or not.
HOOK = """
import sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        print("import", name, file=sys.stderr)
sys.meta_path.insert(0, Hook())
sys.argv[:] = ["hpcddp", *sys.argv[1:]]
"""

CALL = "from hpcddp.cli import main; main()"


def imported(statement: str, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", HOOK + statement, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    return {line.removeprefix("import ") for line in lines if line.startswith("import ")}


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}
