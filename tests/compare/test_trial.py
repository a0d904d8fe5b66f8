"""Every strategy in one table: its rows, what they say, and who is left when it is broken off."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sites import COMMAND, Outcome, Site, record_run

from hpcddp.cli.strategies import LEGEND, _print_table
from hpcddp.compare.strategy_cases import Case
from hpcddp.compare.trial import Trial, TrialProcesses, figures
from hpcddp.rundir import RunDir

Command = Callable[..., Outcome]
JOB = "global_batch = 8\nepochs = 1\n[ddp]\nbucket_mb = 1\n[pp]\nchunks = 4\n"
TASK = """
import time
import torch
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        if type(self) is not Layer:  # fully_shard makes a class of its own
            raise ValueError("I do not like to be divided")
        return super().forward(x)

def model():
    return nn.Sequential(Layer(4, 6), nn.Tanh(), nn.Dropout(0.0), nn.LayerNorm(6), nn.Linear(6, 2))

def dataset(split, pause=0.0):
    assert split == "train", "an evaluation takes its time"
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return Slow(x, (x.sum(1) > 0).long(), pause)

class Slow(torch.utils.data.TensorDataset):
    def __init__(self, x, y, pause):
        super().__init__(x, y)
        self.pause = pause
    def __getitem__(self, i):
        time.sleep(self.pause)
        return super().__getitem__(i)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
NOTED = TASK.replace("nn.Dropout(0.0)", "nn.Dropout(0.5)")


def test_what_fails_or_cannot_be_is_a_row_and_the_others_go_on(site: Site, hpcddp: Command) -> None:
    site.job("toy", JOB, NOTED)
    names = ("ddp", "tp", "fsdp", "pp=2", "pp interleaved", "pp=4")
    only = [word for name in names for word in ("--only", name)]
    done = hpcddp("strategies", "toy", "--ranks", "2", "--steps", "5", "--json", "--keep", "kept",
                  *only)  # fmt: skip
    assert done.code == 4, done.text
    rows = {row["name"]: row for row in json.loads(done.out)["rows"]}
    assert list(rows) == ["single", *names]
    ends = {name: row["ended"] for name, row in rows.items()}
    assert ends.pop("fsdp") == "failed" and rows["fsdp"]["reason"] == (
        "ValueError: I do not like to be divided"
    )
    assert (ends.pop("tp"), ends.pop("pp interleaved"), ends.pop("pp=4")) == ("refused",) * 3
    assert rows["tp"]["reason"] == "tp finds no layers to divide"
    assert rows["pp interleaved"]["reason"].startswith("pp cannot make 4 stages from ")
    assert rows["pp=4"]["reason"] == "pp=4 = 4, but there are 1 x 2 = 2 ranks"
    assert set(ends.values()) == {"done"}
    assert rows["single"]["difference"]["fp64"] == 0 and rows["single"]["step_s"] > 0
    assert [rows[name]["ranks"] for name in ends] == [1, 2, 2]
    assert done.err.count("note: the model has Dropout: ranks draw different random numbers") == 1
    assert len(list(Path("kept").glob("log-*"))) == 3  # of one, of two, and behind the failure


def test_losses_are_those_of_one_process(site: Site, hpcddp: Command) -> None:
    site.job("toy", JOB, TASK)
    only = ("--only", "zero1", "--only", "pp gpipe", "--only", "dp")
    done = hpcddp("strategies", "toy", "--ranks", "2", "--steps", "6", *only)
    assert done.code == 0, done.text
    head, units, *rows = done.out.splitlines()
    assert head.split()[:3] == ["strategy", "float64", "float32"] and units.startswith("2 ranks")
    assert [re.split("  +", row)[0] for row in rows] == ["single", "dp", "zero1", "pp gpipe"]
    assert [row.endswith("  one process") for row in rows] == [True, True, False, False]
    differences = [re.split("  +", row)[1:3] for row in rows]
    assert all(float(double) <= 1e-9 for double, _ in differences)
    assert all(float(single) <= 1e-5 for _, single in differences)
    assert float(differences[2][1]) > 0  # the float32 training is another one
    assert done.err.strip().endswith(LEGEND) and "note: the model" not in done.err
    assert not (site.folder / "runs").exists()


def trial(folder: Path, name: str, step: float, peaks: tuple[int, ...], ranks: int = 4) -> Trial:
    """As its ranks leave it."""
    runs = {}
    for precision in ("fp32", "fp64"):
        run = RunDir(folder / name / precision)
        run.attempt(1).path.mkdir(parents=True)
        record_run(run, (1, 1), ranks, "local")
        records = [
            {"event": "train", "step": i, "loss": 2 + (precision == "fp32") / 1000,
             "step_s": step if i > 2 else 9.0, "sent": 2_500_000,
             "memory": {"parameters": 4_000_000, "gradients": 3_000_000, "optimizer": 8_120_000,
                        "buffers": 0, "peak": peak}}
            for i, peak in enumerate(peaks, 1)
        ]  # fmt: skip
        records.append({"event": "end", "step": len(peaks)})
        run.attempt(1).metrics.write_text("".join(json.dumps(r) + "\n" for r in records))
        runs[precision] = run
    return Trial(Case(name, name), ranks, runs)


def test_a_row_has_medians_of_the_later_steps_and_the_last_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        trial(tmp_path, "single", 0.0512, (1, 2, 3, 20_000_000, 21_000_000), 1),
        trial(tmp_path, "tp", 0.012345, (0, 0, 5, 9_000_000)),
        Trial(Case("zero1", "zero1"), 4, reason="its ranks ended", failed=True),
        Trial(Case("pp=2,ddp=2", "pp=2,ddp=2"), 4, reason="pp cannot divide a Net"),
    ]
    assert made[0].done and made[1].done
    assert figures(made[1]).step == 0.012345 and figures(made[1]).memory["peak"] == 9_000_000
    _print_table(iter(made), 4, 5, [t.case.name for t in made])
    assert capsys.readouterr().out.splitlines() == [
        "strategy    float64  float32   params    grads    optim     peak     sent     step",
        "4 ranks                            MB       MB       MB       MB       MB       ms",
        "single      0.0e+00  5.0e-04     4.00     3.00     8.12    21.00     2.50     51.2"
        "  one process",
        "tp          0.0e+00  5.0e-04     4.00     3.00     8.12     9.00     2.50     12.3",
        "zero1       failed: its ranks ended",
        "pp=2,ddp=2  refused: pp cannot divide a Net",
    ]


def test_without_reference_or_measures_there_are_dashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trial(tmp_path, "tp", 0.01, (1, 1, 1, 1))
    file = made.runs["fp32"].attempt(1).metrics
    text = re.sub(r'"sent": \d+', '"sent": null', file.read_text())
    file.write_text(text.replace('"memory"', '"x"'))
    _print_table(iter([made]), 4, 4, ["tp"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.split() == ["tp", *"-------", "10.0"]


def test_what_is_wrong_with_the_job_is_told_at_once(site: Site, hpcddp: Command) -> None:
    done = hpcddp("strategies", "nothing")
    assert done.code == 2 and "unknown job 'nothing'" in done.err
    done = hpcddp("strategies", "toy", "--set", "train.lr=-1")
    assert done.code == 2 and "train.lr" in done.err and not done.out
    site.write("jobs/words.toml", 'command = ["python", "train.py"]\n')
    done = hpcddp("strategies", "words")
    assert done.code == 2 and "distributes its model" in done.err and not done.out
    done = hpcddp("strategies", "toy", "--keep", "jobs")
    assert done.code == 2 and "the folder jobs exists already" in done.err


def of_this(folder: Path) -> list[str]:
    """The processes whose words name a folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has left
            continue
        if str(folder) in words and int(path.parent.name) != os.getpid():
            lines.append(words)
    return lines


def test_an_interrupt_leaves_no_process(site: Site) -> None:
    site.job("toy", JOB, TASK)
    words = ("toy", "--ranks", "2", "--steps", "4", "--keep", str(site.folder / "kept"))
    slow = ("--only", "ddp", "--set", "dataset.pause=0.1")
    hears = ("env", "--default-signal=INT")  # what a shell runs in the background ignores it
    process = subprocess.Popen([*hears, COMMAND, "strategies", *words, *slow], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout
    head = [process.stdout.readline() for _ in range(2)]
    assert head[0].startswith("strategy"), head
    process.stdout.readline()  # the reference's row: the next ones begin
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err
    assert not of_this(site.folder / "kept")


class Interrupted(subprocess.Popen[bytes]):
    """Ctrl-C comes while it starts, before anybody knows of it."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        STARTED.append(self)
        signal.raise_signal(signal.SIGINT)


STARTED: list[Interrupted] = []


def test_an_interrupt_at_the_start_of_ranks_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcddp.compare.trial.Popen", Interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        TrialProcesses([Trial(Case("ddp", "ddp"), 1)], [], tmp_path).__enter__()
    assert signal.getsignal(signal.SIGINT) == before
    (process,) = STARTED
    try:
        assert process.returncode is not None and not of_this(tmp_path)
    finally:
        process.kill()
        process.wait()
