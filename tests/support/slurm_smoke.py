"""The tests marked `smoke` on each Slurm release, and the table of what came out."""

import json
import os
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import images
import slurm_releases
from slurm_releases import CHECKOUT, SUITES, ReleaseError

RECORD = CHECKOUT / "tests/golden/slurms.json"  # what README's table shows
README = CHECKOUT / "README.md"
HEADING = "### Slurm releases\n\n"  # of README; up to the next section all is made here
ABOUT = """\
These tests start jobs on each release, preempt and cancel them, and kill ranks and nodes. A test is
skipped where Debian's release lacks a part or has a broken one.

"""
REASON, SLURM = "reason", "slurm"  # a row's own keys; the others name tests
Row = dict[str, str]


def run(versions: Sequence[str] = (), quick: bool = False) -> dict[str, Row]:
    """Release -> its row: what each test came to, or the reason why there is none.

    Args:
        versions: only these, and only if they are set up; all of them are set up first otherwise.
        quick: only the tests marked with `quick=True`.
    """
    rows = {}
    if not versions and not quick:
        try:
            images.made()
        except ReleaseError as error:  # the tests with containers fail, and say so
            print(error, flush=True)
    for version in versions or SUITES:
        try:
            if not versions:
                print(f"Slurm {version}: set-up", flush=True)
                slurm_releases.set_up(version)
            elif not slurm_releases.ready(version):
                raise ReleaseError(slurm_releases.state(version))
            rows[version] = _run(version, quick)
        except ReleaseError as error:
            rows[version] = {REASON: str(error)}
    return rows


def _run(version: str, quick: bool) -> Row:
    slurm = slurm_releases.state(version).split()[2].rstrip(",")
    print(f"Slurm {slurm}: tests", flush=True)
    with tempfile.TemporaryDirectory(prefix="smoke-", dir=slurm_releases.root()) as made:
        report = Path(made, "report.xml")
        python = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        chosen = f"--smoke={'quick' if quick else 'all'}"
        folders = [Path(made)]
        if images.ready():
            os.environ["TEST_IMAGE"] = str(images.folder())
            folders.append(images.folder())
        code = slurm_releases.run(
            version, [*python, chosen, f"--junitxml={report}", "tests/slurm"], folders
        )
        if not report.exists():
            raise ReleaseError(f"pytest gave no report; its exit code is {code}")
        return {SLURM: slurm} | outcomes(report.read_text())


def outcomes(report: str) -> Row:
    """What a report of pytest, in JUnit's format, says of each test marked `smoke`."""
    row: Row = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "passed"
        for tag, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            outcome = word if tag in kinds else outcome
        for entry in case.iter("property"):
            if entry.get("name") == "smoke":
                label = entry.get("value", "")
                row[label] = max(row.get(label, ""), outcome, key=_weight)
    return row


def _weight(outcome: str) -> int:
    """Of two outcomes the heavier one counts."""
    return ("", "passed", "skipped", "failed").index(outcome)


def failures(rows: Mapping[str, Row]) -> int:
    """Tests that failed. A release that cannot be had is none."""
    return sum(outcome == "failed" for row in rows.values() for outcome in row.values())


def table(rows: Mapping[str, Row]) -> str:
    """In Markdown: a line for each test, a column for each release."""
    tests = [name for row in rows.values() for name in row if name not in (REASON, SLURM)]
    heads = [row.get(SLURM, version) for version, row in rows.items()]
    lines = [["Slurm", *heads], ["---"] * (1 + len(heads))]
    for test in dict.fromkeys(tests):
        lines += [[test, *(row.get(test, "not run") for row in rows.values())]]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    reasons = [f"{version}: {row[REASON]}" for version, row in rows.items() if REASON in row]
    return "\n\n".join([text, *reasons])


def summary(rows: Mapping[str, Row]) -> str:
    """For README: each release with how many tests passed."""
    lines = ["| Slurm | tests |", "| --- | --- |"]
    for version, row in rows.items():
        counts = Counter(outcome for name, outcome in row.items() if name not in (REASON, SLURM))
        text = ", ".join(f"{counts[word]} {word}" for word in ("passed", "skipped", "failed")
                         if counts[word]) or row[REASON]  # fmt: skip
        lines.append(f"| {row.get(SLURM, version)} | {text} |")
    return ABOUT + "\n".join(lines) + "\n"


def record(rows: Mapping[str, Row]) -> None:
    """Keep what came out beside what is known of other releases, and show it in README."""
    rows = json.loads(RECORD.read_text()) | dict(rows)
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    before, heading, rest = README.read_text().partition(HEADING)
    _, next_one, after = rest.partition("\n## ")
    README.write_text(before + heading + summary(rows) + next_one + after)
