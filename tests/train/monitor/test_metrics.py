"""What a run writes down, and how a person reads it."""

import io
import json
import subprocess
import sys

from hpcddp.attempt.joblog import line
from hpcddp.rundir import RunDir, read_lines, read_step
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.monitor.metrics import Recorder

RANKS = [
    {"rank": 0, "node": 0, "local": 0, "host": "n1", "device": "cuda:0", "cpus": "0-3"},
    {"rank": 10, "node": 1, "local": 2, "host": "node-7", "device": "cuda:2", "cpus": "8,10"},
]


def test_records_are_there_at_once_with_attempt_and_time(tmp_path):
    attempt = RunDir(tmp_path).attempt(3)
    seen = []
    record = Recorder(attempt, active=True, on_record=seen.append)
    record("eval", step=5, epoch=1, metrics={"loss": 0.25}, count=4, counted={})
    (found,) = read_lines(attempt.metrics)  # before it is closed
    record.close()
    assert (found["event"], found["attempt"], found["step"]) == ("eval", 3, 5)
    assert found["time"] > 0 and seen == [found]


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    attempt = RunDir(tmp_path).attempt(1)
    record = Recorder(attempt, active=False)
    record("end", outcome="done", step=1)
    assert not attempt.metrics.exists() and capsys.readouterr().out == ""


def test_a_second_life_of_an_attempt_appends(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    for step in (1, 2):
        record = Recorder(attempt, active=True)
        record("end", outcome="stopped", step=step)
        record.close()
    steps = [json.loads(text)["step"] for text in attempt.metrics.read_text().splitlines()]
    assert steps == [1, 2]


def test_the_rank_table_has_straight_columns():
    table = line({"event": "ranks", "backend": "nccl", "ranks": RANKS}).splitlines()
    assert table == [
        "rank  node  local  host    device  cpus",
        "0     0     0      n1      cuda:0  0-3",
        "10    1     2      node-7  cuda:2  8,10",
        "nccl on 2 GPUs",
    ]
    text = line({"event": "ranks", "backend": "gloo", "ranks": RANKS[:1]})
    assert text.endswith("\ngloo on CPU, 1 rank")


def test_the_end_tells_counts_for_truth_values_and_means_for_the_rest():
    end = {
        "event": "end",
        "outcome": "done",
        "step": 280,
        "seed": 7,
        "count": 360,
        "metrics": {"accuracy": 354 / 360, "loss": 0.07123},
        "counted": {"accuracy": 354},
    }
    assert line(end).splitlines() == [
        "done at step 280",
        "accuracy 0.9833 (354 of 360 held-out samples, seed 7)",
        "loss 0.0712 (mean of 360 held-out samples, seed 7)",
    ]
    assert line({"event": "end", "outcome": "stopped", "step": 3}) == "stopped at step 3"
    unknown = {"event": "end", "outcome": "stopped", "step": None, "saved": None}
    assert line(unknown) == "stopped"  # it could not be read


def test_a_full_disk_loses_records_and_stops_nothing(tmp_path, capsys):
    """/dev/full takes nothing; afterwards the file is whole lines."""
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    for file in (attempt.metrics, attempt.step):
        file.symlink_to("/dev/full")
    record = Recorder(attempt, active=True)
    record.took(1)
    record("end", outcome="stopped", step=1)
    record.close()
    assert capsys.readouterr().out == "stopped at step 1\n"


CUT_SHORT = """
import os, sys
from hpcddp.rundir import RunDir
from hpcddp.train.monitor.metrics import Recorder
attempt = RunDir(sys.argv[1]).attempt(1)
record = Recorder(attempt, active=True)
for step in (1, 2):
    record.took(step)
    os.truncate(attempt.step, 0)  # as where a file system lost a page of it
record.took(3)
"""


def test_the_file_of_the_last_step_ends_no_rank(tmp_path):
    """A map of it would: by SIGBUS, where a page of the file has no place on the disk."""
    subprocess.run([sys.executable, "-c", CUT_SHORT, str(tmp_path)], check=True)
    assert read_step(RunDir(tmp_path).attempt(1))[0] == 3


def test_nothing_is_written_or_said_once_the_lease_is_lost(tmp_path, capsys):
    run = RunDir(tmp_path)
    lease = Lease(run, 1)
    record = Recorder(run.attempt(1), active=True, lease=lease)
    record("end", outcome="stopped", step=1)
    lease.lost = True
    record("end", outcome="stopped", step=2)
    record.close()
    assert [r["step"] for r in read_lines(run.attempt(1).metrics)] == [1]
    assert "step 2" not in capsys.readouterr().out


def test_a_line_that_stands_there_in_part_spoils_no_other(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    record = Recorder(attempt, active=True)

    class Full(io.FileIO):  # takes three bytes of the first line, as the end of a disk does
        def write(self, data):
            full, self.full = getattr(self, "full", True), False
            return super().write(data[:3] if full else data)

    record._file.close()
    record._file = Full(attempt.metrics, "a")
    for step in (1, 2, 3):
        record("end", outcome="stopped", step=step)
    record.close()
    assert [r["step"] for r in read_lines(attempt.metrics)] == [2, 3]
