"""A PATH on which Slurm's programs are slow, or answer with errors, though they do what they are
asked: what a busy controller does."""

from pathlib import Path

PROGRAMS = ("scontrol", "squeue", "sbatch", "scancel")

# The request is carried out first, and nobody hears so for a while; the answer that was thrown may
# come before or after that.
SLOW = """#!/usr/bin/python3 -I
import os, random, subprocess, sys, time
program, seconds, errors = {program!r}, {seconds}, {errors}
if {verb!r} not in ["", *sys.argv]:
    os.execv(program, [program, *sys.argv[1:]])
data = None if sys.stdin.isatty() else sys.stdin.buffer.read() if "-" in sys.argv[1:] else None
throw = random.random()
failed = throw < errors
if not failed or throw < errors / 2:
    done = subprocess.run([program, *sys.argv[1:]], capture_output=True)
with open({log!r}, "a") as log:
    print(time.time(), "lost" if failed else "slow", *sys.argv[1:], sep="\\t", file=log)
time.sleep(seconds)
if failed:
    words = random.choice(["Unable to contact slurm controller (connect failure)",
                           "Zero Bytes were transmitted or received"])
    sys.exit(f"{name}: error: {{words}}")
sys.stdout.buffer.write(done.stdout)
sys.stderr.buffer.write(done.stderr)
sys.exit(done.returncode)
"""


def path(
    folder: Path,
    seconds: float,
    errors: float = 0.0,
    only: tuple[str, ...] = PROGRAMS,
    verb: str = "",
) -> str:
    """A PATH with such programs first.

    Args:
        errors: the share of answers that are errors; half of them after the request was carried
            out; 2 for all of them, and all after that.
        verb: one of the programs' own words, where only requests with it are answered so.
    """
    folder.mkdir()
    for name in only:
        program = folder / name
        facts = {"program": f"/usr/bin/{name}", "seconds": seconds, "errors": errors, "verb": verb}
        program.write_text(SLOW.format(**facts, name=name, log=str(folder / "log")))
        program.chmod(0o755)
    return f"{folder}:/usr/local/bin:/usr/bin:/bin"
