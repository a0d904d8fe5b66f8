"""`scripts/slurms`: real Slurms of several generations, and the tests that run on each."""

import argparse
import signal
import sys

import slurm_releases
import slurm_smoke
from slurm_releases import SUITES, ReleaseError


def main() -> int:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is half there is removed
    try:
        return int(options.act(options) or 0)
    except ReleaseError as error:
        print(f"{getattr(options, 'version', '')}: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/slurms", description=__doc__)
    verbs = made.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, act: object, text: str) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=text, description=text)
        one.set_defaults(act=act)
        return one

    verb("list", show, "Show what is set up, and why something could not be.")
    for name, act, text in (
        ("set-up", lambda o: slurm_releases.set_up(o.version), "Make a Slurm ready; it downloads."),
        ("remove", lambda o: slurm_releases.remove(o.version), "Remove a Slurm."),
        ("run", run, "Run a command (bash) on a Slurm, in namespaces that end with it."),
    ):
        one = verb(name, act, text)
        one.add_argument("version", choices=SUITES)
        if name == "run":
            one.add_argument("command", nargs=argparse.REMAINDER)
    smoke = verb("smoke", tests, "Run the tests marked `smoke` on each Slurm; one table.")
    smoke.add_argument("versions", nargs="*", metavar="VERSION", help="only these; never downloads")
    smoke.add_argument("--quick", action="store_true", help="only a few tests")
    smoke.add_argument("--record", action="store_true", help="put what came out into README")
    return made


def show(_: argparse.Namespace) -> None:
    for version, suite in SUITES.items():
        print(f"{version}  {suite:8}  {slurm_releases.state(version)}")


def run(options: argparse.Namespace) -> int:
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    return slurm_releases.run(options.version, words or ["bash"])


def tests(options: argparse.Namespace) -> int:
    if unknown := set(options.versions) - set(SUITES):
        raise ReleaseError(f"no release {', '.join(unknown)}; there are {', '.join(SUITES)}")
    rows = slurm_smoke.run(options.versions, options.quick)
    print(slurm_smoke.table(rows), flush=True)
    if options.record:
        slurm_smoke.record(rows)
    return slurm_smoke.failures(rows)


if __name__ == "__main__":
    sys.exit(main())
