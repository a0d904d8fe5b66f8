"""Checkpoints on disk: what is kept, what is passed over, and what is never run."""

import json
import os
import pathlib
import pickle
import sys

import pytest
import torch
from ranks import TASK, Ranks, make_run, one_rank, records
from torch.distributed.checkpoint import metadata

from hpcddp.errors import (
    CheckpointError,
    CheckpointForeign,
    CheckpointsDamaged,
    JobFileError,
    UserError,
)
from hpcddp.rundir import step_of
from hpcddp.train.checkpoint import checkpoint, damage, dcp_files, plainfile


def names(run):
    return [folder.name for folder in checkpoint.complete(run.checkpoints)]


def again(run, **keys):
    """The same run with other values in its job."""
    job = json.loads(run.job.read_text())
    job["spec"].update(keys)
    run.job.write_text(json.dumps(job))


def resumed(run, attempt=2, **keys):
    """Train on, and say where from."""
    again(run, **keys)
    assert one_rank(run, attempt) == "done"
    return records(run, "start", attempt)[0]["resumed"]


def test_what_lies_in_a_checkpoint(tmp_path):
    run = make_run(tmp_path, max_steps=11, seed=3)  # 9 steps an epoch
    one_rank(run)
    folder = run.checkpoints / "step-11"
    meta = json.loads((folder / "meta.json").read_text())
    assert {k: meta[k] for k in ("format", "step", "epoch", "samples_consumed", "world")} == {
        "format": 1, "step": 11, "epoch": 1, "samples_consumed": 8, "world": 1,
    }  # fmt: skip
    assert (meta["seed"], meta["global_batch"], meta["schedule"]) == (3, 4, "cosine")
    assert meta["versions"]["torch"] == torch.__version__
    found = dcp_files.shapes(folder)
    assert found["model.0.weight"] == (torch.Size([8, 4]), torch.float64)
    assert "optim.3.bias.exp_avg_sq" in found and "rng.0.torch" in found
    assert not any("module." in name for name in found)
    files = json.loads((folder / "COMPLETE").read_text())["files"]
    assert files.keys() == {p.name for p in folder.iterdir()} - {"COMPLETE"}
    assert [p.name for p in run.checkpoints.iterdir() if p.name.startswith(".")] == []


def test_the_newest_and_the_best_are_kept(tmp_path):
    worse = "\n_loss = loss\ndef loss(o, t): return -_loss(o, t)\n"  # trains away from the answer
    job = {"epochs": 5, "max_steps": 0, "checkpoint__every": 2, "train__lr": 0.1}
    best_of = {"checkpoint__best": "accuracy", "checkpoint__best_mode": "max"}
    run = make_run(tmp_path, extra=worse, **job, **best_of)
    one_rank(run)
    evals = records(run, "eval")
    top = max(r["metrics"]["accuracy"] for r in evals)
    best = next(r["step"] for r in evals if r["metrics"]["accuracy"] == top)
    assert best < 44
    assert names(run) == ["step-45", "step-44", f"step-{best}"]


def test_best_of_a_metric_that_is_not_there_is_a_clear_error(tmp_path):
    run = make_run(tmp_path, checkpoint__best="acuracy")
    with pytest.raises(JobFileError, match="the evaluation has accuracy, loss"):
        one_rank(run)


SAID = {
    "truncate": "__0_0.distcp has ",
    "flip": "__0_0.distcp has changed since it was written",
    "unmark": "COMPLETE is missing",
    "tear mark": "COMPLETE is damaged",
    "remove file": "__0_0.distcp is missing",
}


@pytest.mark.parametrize("harm", SAID)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys, harm):
    run = make_run(tmp_path, max_steps=3, checkpoint__every=1, checkpoint__keep=3)
    one_rank(run)
    newest = run.checkpoints / "step-3"
    data = newest / "__0_0.distcp"
    if harm == "truncate":
        os.truncate(data, data.stat().st_size // 2)
    elif harm == "flip":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif harm == "unmark":
        (newest / "COMPLETE").unlink()
    elif harm == "tear mark":
        os.truncate(newest / "COMPLETE", 30)
    else:
        data.unlink()
    assert resumed(run) == "checkpoints/step-2"
    assert f"step-3 is damaged ({SAID[harm]}" in capsys.readouterr().out
    assert damage.of_content(newest) == ""  # written again, whole


def test_what_a_crash_left_half_written_is_removed_and_what_has_lost_its_content_is_not(tmp_path):
    run = make_run(tmp_path, max_steps=2)
    one_rank(run)
    half = run.saving(1) / "step-9"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"x")
    (run.checkpoints / "step-7").mkdir()  # as when a file system lost the content
    assert resumed(run, max_steps=3) == "checkpoints/step-2"
    assert not half.parent.exists() and (run.checkpoints / "step-7").exists()


def malicious(folder, payload, name=".metadata"):
    """Put something in place of a file, with everything else in order."""
    (folder / name).write_bytes(payload)
    mark = json.loads((folder / "COMPLETE").read_text())
    mark["files"][name] = damage.digest(folder / name)
    (folder / "COMPLETE").write_text(json.dumps(mark))


class Evil:
    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


def evil_payloads(marker, folder):
    """Pickles that run something when they are loaded freely."""
    good = dcp_files.read_metadata(folder)
    with_evil_member = metadata.Metadata({}, planner_data=Evil(os.mkdir, marker))
    with_bytes = metadata.Metadata(
        good.state_dict_metadata | {"model.0.bias": metadata.BytesStorageMetadata()},
        storage_data=good.storage_data,
    )
    for info in list(good.storage_data.values())[:1]:
        info.relative_path = "../../../outside"
    return {
        "call": Evil(os.mkdir, marker),
        "eval": Evil(eval, f"__import__('os').mkdir({marker!r})"),
        "getattr": Evil(getattr, pathlib.PosixPath, "mkdir"),
        "inside": with_evil_member,
        "torch.load": Evil(torch.load, marker),
        "bytes entry": with_bytes,
        "file outside": good,
        "something else": {"state_dict_metadata": {}},
    }


@pytest.mark.parametrize(
    "kind",
    [
        "call", "eval", "getattr", "inside", "torch.load", "bytes entry", "file outside",
        "something else",
    ],
)  # fmt: skip
def test_loading_executes_nothing(tmp_path, kind):
    run = make_run(tmp_path, max_steps=2)
    one_rank(run)
    folder, marker = run.checkpoints / "step-2", tmp_path / "executed"
    payload = pickle.dumps(evil_payloads(str(marker), folder)[kind])
    if kind in ("call", "eval", "inside"):
        pickle.loads(payload)  # the payload works
        marker.rmdir()
    malicious(folder, payload)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint's metadata"):
        plainfile.export(run, tmp_path / "out.pt")
    again(run, max_steps=3)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint's metadata"):
        one_rank(run, 2)  # it is the only one: a restart from the beginning is a person's decision
    assert names(run) == ["step-2"] and not marker.exists()


def test_the_metadata_of_an_early_python_3_11_is_read(tmp_path, monkeypatch):
    """It pickled a member of an enumeration as an attribute, up to 3.11.3; Debian 12 has 3.11.2."""
    kind = metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self.name)))
    run = make_run(tmp_path, max_steps=2)
    one_rank(run)
    folder = run.checkpoints / "step-2"
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert "model.0.weight" in dcp_files.read_metadata(folder).state_dict_metadata
    again(run, max_steps=3)
    one_rank(run, 2)
    assert "step-3" in names(run)


META = {
    "no JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 10**5,
    "without a step": b'{"format": 1}',
    "another step": b'{"step": 7}',
    "other kinds": b'{"optimizer": []}',
    "metadata": b"",
}


@pytest.mark.parametrize("kind", META)
def test_what_is_unreadable_in_whole_files_is_passed_over_too(tmp_path, capsys, kind):
    run = make_run(tmp_path, max_steps=3, checkpoint__every=1, checkpoint__keep=3)
    one_rank(run)
    folder, marker = run.checkpoints / "step-3", tmp_path / "executed"
    if kind == "metadata":
        malicious(folder, pickle.dumps(Evil(os.mkdir, str(marker))))
    else:
        meta = json.loads((folder / "meta.json").read_text())
        text = META[kind]
        if kind in ("another step", "other kinds"):
            text = json.dumps(meta | json.loads(text)).encode()
        malicious(folder, text, "meta.json")
    assert plainfile.export(run, tmp_path / "out.pt") == 2
    assert resumed(run) == "checkpoints/step-2"
    assert "step-3 is damaged" in capsys.readouterr().out and not marker.exists()
    assert damage.of_format(folder) == ""  # written again


@pytest.mark.parametrize("harm", ["cut", "unmark"])
def test_where_no_checkpoint_is_whole_the_run_stops_and_nothing_is_removed(tmp_path, harm):
    run = make_run(tmp_path, max_steps=3, checkpoint__every=1, checkpoint__keep=2)
    one_rank(run)
    there = sorted(run.checkpoints.iterdir())
    assert len(there) == 2
    for folder in there:
        if harm == "cut":
            data = folder / "__0_0.distcp"
            os.truncate(data, data.stat().st_size - 1)
        else:
            (folder / "COMPLETE").unlink()
    again(run, max_steps=9)
    wrong = {"cut": r"__0_0.distcp has \d+ of \d+ bytes", "unmark": "COMPLETE is missing"}[harm]
    with pytest.raises(CheckpointsDamaged, match=f"newest of 2, step-3: {wrong}\n  .*move this"):
        one_rank(run, 2)
    assert [p for p in sorted(run.checkpoints.iterdir()) if step_of(p)] == there
    assert records(run, "train", 2) == []


def test_what_cannot_be_read_is_not_damaged(tmp_path):
    """An older one is no answer to who asks for the newest."""
    run = make_run(tmp_path, max_steps=2, checkpoint__every=1)
    one_rank(run)
    for name in ("COMPLETE", "__0_0.distcp", ".metadata"):
        file = run.checkpoints / "step-2" / name
        content = file.read_bytes()
        file.unlink()
        file.symlink_to(file)  # ELOOP
        with pytest.raises(CheckpointError, match=f"{name}: cannot be read: Too many"):
            plainfile.export(run, tmp_path / "out.pt")
        if name == "__0_0.distcp":
            with pytest.raises(OSError, match="Too many"):
                dcp_files.read_all(file.parent)
        file.unlink()
        file.write_bytes(content)
    assert plainfile.export(run, tmp_path / "out.pt") == 2


def test_a_checkpoint_of_another_format_is_not_passed_over(tmp_path):
    run = make_run(tmp_path, max_steps=3, checkpoint__every=1, checkpoint__keep=3)
    one_rank(run)
    folder = run.checkpoints / "step-3"
    meta = json.loads((folder / "meta.json").read_text()) | {"format": 2}
    malicious(folder, json.dumps(meta).encode(), "meta.json")
    with pytest.raises(CheckpointForeign, match="format 2"):
        one_rank(run, 2)
    assert names(run) == ["step-3", "step-2", "step-1"]


def test_a_tensor_file_that_runs_something_is_not_run(tmp_path):
    run = make_run(tmp_path, max_steps=2)
    one_rank(run)
    folder, marker = run.checkpoints / "step-2", tmp_path / "executed"
    data = folder / "__0_0.distcp"
    torch.save(Evil(os.mkdir, str(marker)), data)
    (info, *_) = dcp_files.read_metadata(folder).storage_data.values()
    content = data.read_bytes()
    data.write_bytes(content.ljust(max(info.length, len(content)), b"\0"))
    mark = json.loads((folder / "COMPLETE").read_text())
    mark["files"][data.name] = damage.digest(data)
    (folder / "COMPLETE").write_text(json.dumps(mark))
    with pytest.raises(CheckpointError):
        plainfile.export(run, tmp_path / "out.pt")
    assert not marker.exists()


def test_export_is_a_file_that_a_plain_model_loads(tmp_path):
    run = make_run(tmp_path, max_steps=5)
    one_rank(run)
    target = tmp_path / "model.pt"
    assert plainfile.export(run, target) == 5
    module = sys.modules["small_task"]
    plain = module.model()
    plain.load_state_dict(torch.load(target, weights_only=True))
    saved = dcp_files.read_all(run.checkpoints / "step-5", "model.")
    assert all(torch.equal(v, saved[f"model.{k}"]) for k, v in plain.state_dict().items())
    data = module.dataset("eval")
    correct = module.metrics(plain(data.tensors[0]), data.tensors[1])["accuracy"].sum().item()
    assert correct == records(run, "eval")[-1]["counted"]["accuracy"]


def test_export_without_a_checkpoint_or_a_folder_is_told(tmp_path):
    run = make_run(tmp_path, max_steps=1)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        plainfile.export(run, tmp_path / "model.pt")
    one_rank(run)
    with pytest.raises(UserError, match="cannot be written"):
        plainfile.export(run, tmp_path / "nowhere" / "model.pt")


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    run = make_run(tmp_path, max_steps=1)
    one_rank(run)
    task = TASK.replace("nn.Linear(8, 2)", "nn.Linear(8, 2, bias=False)")
    (tmp_path / "small_task.py").write_text(task)
    with pytest.raises(
        CheckpointError, match=r"3\.bias is \[2\] in the checkpoint and missing in the model"
    ):
        one_rank(run, 2)


class Crash(Exception):
    pass


@pytest.mark.parametrize("cut, workers", [(5, 0), (9, 0), (13, 1)])
def test_resume_is_bit_for_bit_the_uninterrupted_run(tmp_path, cut, workers):
    """9 steps are an epoch; dropout draws random numbers, accumulation splits the steps."""
    job = {"max_steps": 20, "checkpoint__every": cut, "checkpoint__best": "",
           "train__micro_batch": 2, "model__dropout": 0.4, "data__workers": workers}  # fmt: skip
    whole, parts = make_run(tmp_path / "whole", **job), make_run(tmp_path / "parts", **job)
    one_rank(whole)

    def crash(record):
        if record["event"] == "train" and record["step"] == cut + 2:
            raise Crash

    with pytest.raises(Crash):
        one_rank(parts, on_record=crash)
    assert resumed(parts) == f"checkpoints/step-{cut}"
    a, b = (dcp_files.read_all(run.checkpoints / "step-20") for run in (whole, parts))
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    losses = {r["step"]: r["loss"] for r in records(parts, "train", 2)}
    assert losses == {r["step"]: r["loss"] for r in records(whole, "train") if r["step"] > cut}


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    """2 ranks, then 1, in the middle of an epoch: the batches and so the losses stay the same.
    The one held-out sample counts once, also when there are more ranks than that."""
    alone = make_run(tmp_path / "alone", max_steps=12, dataset__held_out=1)
    one_rank(alone)
    moved = make_run(tmp_path / "moved", gpus=2, max_steps=12, checkpoint__every=5,
                     checkpoint__keep=9, dataset__held_out=1)  # fmt: skip
    with Ranks.of(moved, 2) as ranks:
        assert [code for code, _, _ in ranks.wait()] == [0, 0]
    for name in ("step-12", "step-10", "step-9"):
        (moved.checkpoints / name / "COMPLETE").unlink()
    job = json.loads(moved.job.read_text())
    moved.job.write_text(json.dumps(job | {"gpus_per_node": 1}))
    assert resumed(moved) == "checkpoints/step-5"
    ours = [r["loss"] for n in (1, 2) for r in records(moved, "train", n)]
    theirs = [r["loss"] for r in records(alone, "train")]
    torch.testing.assert_close(ours, [*theirs, *theirs[5:]], rtol=1e-6, atol=0)
    first, second = (records(run, "eval")[-1] for run in (alone, moved))
    assert first["metrics"] == pytest.approx(second["metrics"]) and first["count"] == 1
