"""Trackers: one run for all attempts, and each step once, read back from their files."""

import json
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_runs import Command
from made import BEGAN
from sites import COMMAND, Outcome, Site
from trackers_told import files_of, history, scalars, text
from trackers_told import made as made

from hpcddp.errors import JobFileError, UserError, install_extra
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.trackers import __main__, module
from hpcddp.trackers.send import Sender
from hpcddp.trackers.step_values import StepReader
from hpcddp.trackers.to_wandb import mode

Points = dict[int, float]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def mlflow_runs(run: RunDir) -> tuple[Any, list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(str(run.path.parent / "mlruns"))
        ids = [e.experiment_id for e in client.search_experiments()]
        return client, list(client.search_runs(ids))


def write_lines(run: RunDir, attempt: int, *lines: dict[str, Any]) -> None:
    path = run.attempt(attempt).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write("".join(json.dumps({"time": BEGAN, **line}) + "\n" for line in lines))


def point(step: int, loss: float) -> dict[str, Any]:
    return {"event": "train", "step": step, "loss": loss}


def test_the_reader_gives_each_step_once_with_all_its_values(made: Callable[..., RunDir]) -> None:
    steps = StepReader(made()).new(over=True)
    assert [step.step for step in steps] == list(range(1, 401))
    assert max(step.values["loss"] for step in steps) < 3
    assert steps[99].values.keys() >= {"loss", "lr", "wait_s", "eval/accuracy"}


def test_an_older_attempt_tells_nothing_of_a_newer_one(made: Callable[..., RunDir]) -> None:
    assert [step.step for step in StepReader(made(), last=2).new(over=True)] == list(range(1, 261))


def test_a_step_waits_for_what_may_still_be_told_of_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reader = StepReader(run)
    write_lines(run, 1, {"event": "start", "step": 0}, point(1, 3.0), point(2, 2.0))
    assert [r.step for r in reader.new()] == [1]
    write_lines(run, 1, {"event": "eval", "step": 2, "metrics": {"loss": 7.0}}, point(3, 1.0))
    (step,) = reader.new()
    assert (step.step, step.values) == (2, {"loss": 2.0, "eval/loss": 7.0})
    write_lines(run, 1, point(4, 4.0), {"event": "rollback", "step": 4, "to": 1}, point(2, 5.0))
    assert [(r.step, r.values["loss"]) for r in reader.new(over=True)] == [(2, 5.0)]
    write_lines(
        run, 2, {"event": "start", "step": 2}, {"event": "log", "step": 2, "metrics": {"x": 1}}
    )
    (step,) = reader.new(over=True)  # a known step has new values
    assert (step.step, step.values) == (2, {"loss": 5.0, "log/x": 1.0})


def test_lines_that_hold_nonsense_tell_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_lines(run, 1, point(-1, 1.0), {"event": "train", "step": 2**64, "loss": 1.0}, {"step": 1},
         {"event": "eval", "step": 1, "metrics": [1]}, {"event": "slow"},
         {"event": "train", "step": 1, "loss": True, "lr": 10**400, "step_s": "x"},
         {"event": "train", "step": 3, "loss": 1.0, "time": "then"})  # fmt: skip
    (step,) = StepReader(run).new(over=True)
    assert (step.step, step.time, step.values) == (3, 0.0, {"loss": 1.0})


def test_tensorboard_has_each_step_once_with_its_later_value(
    made: Callable[..., RunDir], command: Command
) -> None:
    """Sent during the second attempt, and again after the end."""
    run = made()
    third = run.attempt(3).path.rename(run.path / "later")
    assert command("track", run.name, "--to", "tensorboard").code == 0
    assert dict(scalars(run, "loss"))[255] == 99.0
    third.rename(run.attempt(3).path)
    done = command("track", run.name, "--to", "tensorboard")
    assert done.code == 0, done.text
    points = scalars(run, "loss")
    assert [step for step, _ in points] == list(range(1, 401))
    assert max(value for _, value in points) < 3
    assert [step for step, _ in scalars(run, "eval/accuracy")] == [100, 200, 300, 400]
    assert files_of(run).Scalars("lr")[0].wall_time > BEGAN
    config, attempts = text(run, "config"), text(run, "attempts")
    assert "| train.lr | 0.5 |" in config and "a-secret" not in config
    assert "attempt 2 on n[1-2]: preempted" in attempts and "10 of them repeated" in attempts
    before = sorted(run.tensorboard.iterdir())
    command("track", run.name, "--to", "tensorboard")
    assert sorted(run.tensorboard.iterdir()) == before  # nothing new to send
    for path in before:
        path.unlink()
    run.tensorboard.rmdir()
    command("track", run.name, "--to", "tensorboard")
    assert len(scalars(run, "loss")) == 400


def told(err: str) -> list[tuple[str, int]]:
    """The trackers of the lines that `hpcddp track` ends with, and the steps that each got."""
    lines = [re.fullmatch(r"(\w+): sent (\d+) steps to .+", line) for line in err.splitlines()]
    assert all(lines), err
    return [(line[1], int(line[2])) for line in lines if line]


def test_mlflow_has_one_run_with_each_step_once(
    made: Callable[..., RunDir], command: Command
) -> None:
    run = made()
    third = run.attempt(3).path.rename(run.path / "later")
    assert command("track", run.name, "--to", "mlflow").code == 0
    third.rename(run.attempt(3).path)
    run.trackers.unlink()  # as if killed before it recorded what it had sent
    done = command("track", run.name, "--to", "mlflow", MLFLOW_EXPERIMENT_NAME="pets")
    assert done.code == 0 and told(done.err) == [("mlflow", 400)]
    client, (one,) = mlflow_runs(run)
    for name, steps in (("loss", range(1, 401)), ("eval/accuracy", range(100, 401, 100))):
        points = client.get_metric_history(one.info.run_id, name)
        assert [metric.step for metric in points] == list(steps)
    assert (one.info.run_name, one.info.status) == (run.name, "FINISHED")
    assert one.data.params["train.lr"] == "0.5" and "a-secret" not in str(one.data.params)
    assert "attempt 2 on n[1-2]: preempted" in one.data.tags["mlflow.note.content"]


def test_wandb_has_one_run_with_each_step_once(
    made: Callable[..., RunDir], command: Command
) -> None:
    run = made()
    third = run.attempt(3).path.rename(run.path / "later")
    first = command("track", run.name, "--to", "wandb")
    assert first.code == 0 and told(first.err) == [("wandb", 260)]
    third.rename(run.attempt(3).path)
    run.trackers.unlink()  # as if killed before it recorded what it had sent
    assert command("track", run.name, "--to", "wandb").code == 0
    lines = history(run)
    assert {name for name, _ in lines} == {run.name}
    assert [values["_step"] for _, values in lines] == list(range(1, 401))
    assert lines[99][1]["eval/accuracy"] == 0.25
    assert lines[0][1]["_timestamp"] == pytest.approx(BEGAN + 10.5)
    kept = b"".join(p.read_bytes() for p in run.path.glob("wandb/offline-run-*/*.wandb"))
    assert b"of them repeated" in kept and b"a-secret" not in kept


def test_a_loss_that_is_no_number_is_told(made: Callable[..., RunDir], command: Command) -> None:
    run = made()
    write_lines(run, 3, point(401, float("nan")), point(402, float("inf")))
    to = ("--to", "tensorboard", "--to", "mlflow", "--to", "wandb")
    assert command("track", run.name, *to).code == 0
    bad = scalars(run, "loss")[-2:]
    assert str(bad) == "[(401, nan), (402, inf)]"
    client, (one,) = mlflow_runs(run)
    values = [m.value for m in client.get_metric_history(one.info.run_id, "loss")]
    assert str(values[-2:]) == "[nan, inf]"
    assert str([v["loss"] for _, v in history(run)][-2:]) in ("['NaN', 'Infinity']", "[nan, inf]")


def following(run: RunDir) -> subprocess.Popen[bytes]:
    words = [COMMAND, "track", run.name, "--follow"]
    words += ["--to", "tensorboard", "--to", "mlflow", "--to", "wandb"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def heard(run: RunDir) -> object:
    """The recorded progress of MLflow; None at first."""
    return (read_json(run.trackers) or {}).get("mlflow", {}).get("told")


def tell_more(run: RunDir, step: int) -> int:
    """Write the next step of a running run."""
    write_lines(run, 1, point(step + 1, step + 1.0))
    time.sleep(0.02)
    return step + 1


def test_a_follower_that_is_killed_loses_nothing_and_tells_nothing_twice(
    made: Callable[..., RunDir],
) -> None:
    run = made(ends=(), steps=1000, last=100, cause=None)
    step = 100
    with following(run) as follower:
        while not (heard(run) and history(run)):
            step = tell_more(run, step)
        time.sleep(0.2)  # at any point of its work
        follower.kill()
    before = heard(run)
    with following(run) as follower:
        while heard(run) == before:
            step = tell_more(run, step)
        facts = read_json(run.attempt(1).facts) or {}
        write_json(run.attempt(1).facts, facts | {"cause": "done", "ended": time.time()})
        output, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert [name for name, _ in told(output.decode())] == ["tensorboard", "mlflow", "wandb"]
    steps = list(range(1, step + 1))
    assert [s for s, _ in scalars(run, "loss")] == steps
    client, (one,) = mlflow_runs(run)
    assert [m.step for m in client.get_metric_history(one.info.run_id, "loss")] == steps
    assert [values["_step"] for _, values in history(run)] == steps


def test_wandb_is_online_where_there_is_a_key(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert mode(home) == "offline"
    assert mode({**home, "WANDB_API_KEY": "x" * 40}) == "online"
    assert mode({**home, "WANDB_API_KEY": "x" * 40, "WANDB_MODE": "offline"}) == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert mode(home) == "online"
    assert mode({**home, "WANDB_BASE_URL": "https://wandb.here"}) == "offline"


def test_what_is_not_installed_is_named_with_what_to_do(
    made: Callable[..., RunDir], hpcddp: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = hpcddp("track", run.name, "--to", "mlflow")
    assert done.code == 2 and "install the extra `mlflow` of hpcddp" in done.err
    assert not run.trackers.exists()


def test_a_tracker_without_its_package_or_of_another_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "hpcddp.trackers.to_tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(UserError, match="cannot load the package tensorboard") as caught:
        module("tensorboard")
    assert caught.value.hint == install_extra("tensorboard")
    with pytest.raises(UserError, match="unknown tracker 'tensorbored'") as caught:
        module("tensorbored")
    assert caught.value.hint == "use one of tensorboard, mlflow, wandb"


def test_a_run_without_metrics_is_not_opened_at_a_tracker(made: Callable[..., RunDir]) -> None:
    run = made()
    shutil.rmtree(run.path / "attempts")
    sender = Sender(run, ["tensorboard", "mlflow"], lambda name, error: pytest.fail(str(error)))
    sender.send()
    sender.close()
    empty = "the run has no metrics yet"
    assert sender.outcomes() == [f"tensorboard: {empty}", f"mlflow: {empty}"]
    assert not run.tensorboard.exists() and not run.trackers.exists()


def test_the_outcome_names_the_steps_that_were_sent_and_their_place(
    made: Callable[..., RunDir],
) -> None:
    run = made()
    sent = []
    for _ in range(2):
        sender = Sender(run, ["tensorboard"], lambda name, error: pytest.fail(str(error)))
        sender.send(over=True)
        sender.close()
        sent += sender.outcomes()
    assert sent == [
        f"tensorboard: sent 400 steps to {run.tensorboard}",
        "tensorboard: no new steps",
    ]


def test_a_tracker_that_fails_does_not_keep_the_others_from_being_told(
    made: Callable[..., RunDir], command: Command
) -> None:
    run = made()
    (run.path.parent / "mlruns").write_text("no folder")
    done = command("track", run.name, "--to", "mlflow", "--to", "tensorboard")
    assert done.code == 1 and done.err.startswith("error: mlflow: ")
    assert "Traceback" not in done.err and len(scalars(run, "loss")) == 400


def test_words_are_said_again_only_when_there_are_others(made: Callable[..., RunDir]) -> None:
    """Not for new steps; attempts that have ended are read once."""
    run = made(cause=None, last=300)
    sender = Sender(run, ["tensorboard"], pytest.fail)
    sender.send()
    run.attempt(1).error.write_text("no JSON any more")
    write_lines(run, 3, *(point(step, 1.0) for step in range(301, 311)))
    sender.send()
    said = files_of(run).Tensors("attempts/text_summary")
    assert len(said) == 1 and scalars(run, "loss")[-1][0] == 309
    assert "attempt 3 on n[1-2]: running, from step 250\n" in text(run, "attempts")
    facts = read_json(run.attempt(3).facts) or {}
    write_json(run.attempt(3).facts, facts | {"cause": "done", "ended": BEGAN})
    sender.send()
    sender.close()
    assert "attempt 3 on n[1-2]: done; steps 250 to 310" in text(run, "attempts")


def test_passwords_in_urls_are_neither_kept_nor_told(
    made: Callable[..., RunDir], command: Command, site: Site
) -> None:
    data = "https://me:a-secret@there/pets"
    run = made(command=["train.py", data], data={"a": {"path": data}})
    login = "me:a-secret@"
    there = f"file://{login}localhost{site.folder}/there"
    to = ("--to", "mlflow")
    done = command("track", run.name, *to, "--to", "tensorboard", MLFLOW_TRACKING_URI=there)
    assert done.code == 0 and "secret" not in done.err
    assert told(done.err) == [("mlflow", 400), ("tensorboard", 400)]
    assert "told" in (read_json(run.trackers) or {})["mlflow"]
    assert "secret" not in run.trackers.read_text()
    assert "| command | ['train.py', 'https://***@there/pets'] |" in text(run, "config")
    asked = [p for p in files(site.folder / "there") if "params" in p.parts]
    kept = [p.read_bytes() for p in asked + files(run.tensorboard)]
    assert len(kept) > 10 and b"a-secret" not in b"".join(kept)
    done = command("track", run.name, *to, MLFLOW_TRACKING_URI=f"odd://{login}there/x")
    assert done.code == 1 and "odd://***@there/x" in done.err and "secret" not in done.err
    with_password = RuntimeError(f"no answer from https://{login}there/x")
    assert "from https://***@there/x)" in __main__.in_words(run, "mlflow", with_password)


def test_a_run_whose_job_tells_a_tracker_is_not_told_twice(
    made: Callable[..., RunDir], command: Command
) -> None:
    run = made(cause=None, last=300, metrics={"trackers": ["wandb"]})
    done = command("track", run.name, "--to", "wandb")
    assert done.code == 2 and "sends to wandb itself" in done.err
    assert command("track", run.name, "--to", "tensorboard").code == 0


def test_a_job_names_trackers_that_there_are(site: Site) -> None:
    layer = Layer()
    layer.put("metrics.trackers", '["tensorboard", "mlflow"]', "--set", text=True)
    assert layer.values["metrics.trackers"] == ["tensorboard", "mlflow"]
    layer.put("metrics.trackers", "wandb mlflow", "--set", text=True)
    assert layer.values["metrics.trackers"] == ["wandb", "mlflow"]
    with pytest.raises(JobFileError, match="some of tensorboard, mlflow, wandb"):
        layer.put("metrics.trackers", ["tensorbored"], "mine.toml")
