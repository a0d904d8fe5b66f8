"""A Lightning Trainer on its run: it comes back where it was, and ends as if undisturbed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_runs import Command, until
from own_loops import both, runs, said, start
from sites import SUPPORT, Site

from hpcddp.attempt import ledger
from hpcddp.errors import UserError
from hpcddp.sandbox import compare

SCRIPT = str(SUPPORT / "lightning_script.py")


@pytest.mark.parametrize(
    ("kind", "steps", "at"),
    [
        # An epoch is 13 batches: it stops after a validation that the schedule at its end asks for.
        ("plain", 39, (16,)),
        pytest.param("plain", 39, (10, 16), marks=pytest.mark.full),
        pytest.param("own-sparse", 21, (2, 14), marks=pytest.mark.full),
        pytest.param("stream-manual", 117, (2, 14), marks=pytest.mark.full),
        pytest.param("workers", 39, (2, 14), marks=pytest.mark.full),
    ],
)
def test_preempted_it_loses_no_step_and_ends_as_if_undisturbed(
    site: Site, command: Command, kind: str, steps: int, at: tuple[int, ...]
) -> None:
    reference, run = both(site, command, SCRIPT, "3", kind, at=at)
    if "stream" not in kind:  # a trace counts batches as they are read, and this reads ahead
        assert compare.difference(reference, run, 2) == ""
    assert said(run, "over") == said(reference, "over")
    assert {line.split()[1] for line in said(run, "over")} == {str(steps)}


def test_a_fit_that_is_over_is_not_done_again(site: Site, command: Command) -> None:
    """What follows it failed: Lightning's own early end, and its result, are there."""
    start(command, "1", "fails", "0", script=SCRIPT)
    until(command, lambda s: s["state"] == "COMPLETED")
    (run,) = runs(site)
    assert [a.cause for a in ledger.attempts(run)] == ["crash", "done"]
    assert len(said(run, "took")) == 26 and set(said(run, "took").values()) == {1}
    assert {line.split()[1] for line in said(run, "over")} == {"13"}


@pytest.mark.full
def test_it_goes_on_with_more_ranks(site: Site, command: Command) -> None:
    start(command, "2", "own", "0.1", size=("--gpus", "1"), script=SCRIPT, stop="3")
    stopped = until(command, lambda s: s["state"] == "STOPPED")["step"]
    assert command("resume", "last", "--gpus", "3", "--detach").code == 0
    until(command, lambda s: s["state"] == "COMPLETED")
    (run,) = runs(site)
    # 103 samples: 4 a step on one rank, then 12 a step on three, in each epoch.
    rest = -(-(103 - 4 * stopped) // 12)
    (ends,) = {tuple(line.split()[1:4]) for line in said(run, "over")}
    assert ends == (str(stopped + rest + 9), "2", str(stopped + rest + 9))


def test_outside_of_a_job_it_changes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "1", "plain", "0"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "over 26" in done.stdout
    assert not [path for path in tmp_path.iterdir() if path.name != "checkpoints"]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_it_is_a_callback_of_the_package_that_the_script_has(package: str) -> None:
    code = f"from {package} import Callback; from hpcddp.lightning import Preemptible as P"
    subprocess.run([sys.executable, "-c", f"{code}; assert issubclass(P, Callback)"], check=True)


OTHER = """
import lightning, torch
from torch.utils.data import DataLoader
from hpcddp.lightning import Preemptible
from lightning.pytorch.demos.boring_classes import BoringModel

first = Preemptible(save_every=2)
for _ in range(2):
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", logger=False, callbacks=[first])
    trainer.fit(BoringModel())
"""


def test_a_second_fit_is_refused(site: Site, command: Command) -> None:
    site.write("twice.py", OTHER)
    done = command("submit", "--set", "requeue.crashes=1", "--", sys.executable, "twice.py")
    assert done.code == 1
    assert "saved checkpoints/step-2" in done.text and "one call of Trainer.fit" in done.text


def test_a_lightning_of_another_make_is_refused_at_the_start() -> None:
    from hpcddp.lightning import _check_loops

    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=None))
    with pytest.raises(UserError, match="have no restarted_mid_epoch") as caught:
        _check_loops(SimpleNamespace(fit_loop=loop))  # type: ignore[arg-type]
    assert "2.6" in caught.value.hint
