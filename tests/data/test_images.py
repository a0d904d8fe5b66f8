"""Unreadable images, and the keys of a run's job about them."""

import pytest
from pictures import number_of, pictures, put
from ranks import make_run
from torch.utils.data import DataLoader

from hpcddp import spec
from hpcddp.data import ImageFolder
from hpcddp.errors import JobFileError, UserError
from hpcddp.train.input.data_workers import end_workers, make_loader, read
from hpcddp.train.input.samples import Samples

BAD = "cat/a001 ü.png"  # sample 1
CPU = __import__("torch").device("cpu")


@pytest.fixture
def folder(tmp_path):
    root = put(tmp_path / "images", pictures())
    (root / BAD).write_bytes(b"no image")
    return root


def test_an_image_that_cannot_be_read_is_named(folder):
    with pytest.raises(UserError, match="invalid image: cannot identify") as error:
        ImageFolder(folder)[1]
    assert error.value.where == str(folder / BAD) and "data.on_bad" in error.value.hint


def test_the_next_one_of_its_class_stands_in_its_place(folder, capfd):
    dataset = ImageFolder(folder, number_of, on_bad="skip")
    for _ in range(3):
        assert dataset[1] == (2, 0)
    (said,) = capfd.readouterr().err.splitlines()
    assert said == f"skipped {folder / BAD}: invalid image: cannot identify image file"


def test_the_last_one_of_a_class_is_replaced_by_the_first(folder, capfd):
    last = sorted(folder.rglob("cat/deep/er/*"))[-1]
    last.write_bytes(last.read_bytes()[:40])  # cut
    assert ImageFolder(folder, number_of, on_bad="skip")[6] == (0, 0)
    assert str(last) in capfd.readouterr().err


def test_an_image_that_went_away_is_one_that_cannot_be_read(folder, capfd):
    dataset = ImageFolder(folder, number_of, on_bad="skip")
    (folder / BAD).unlink()
    assert dataset[1] == (2, 0) and BAD in capfd.readouterr().err
    with pytest.raises(UserError, match="not found"):
        stopping = ImageFolder(folder)
        (folder / "dog" / "a000 ü.png").unlink()
        [stopping[i] for i in range(len(stopping))]


@pytest.mark.parametrize("path", ["/proc/self/mem", BAD], ids=["EIO", "ELOOP"])
def test_a_file_that_the_disk_does_not_give_is_one_that_cannot_be_read(folder, path, capfd):
    dataset = ImageFolder(folder, number_of, on_bad="skip")
    (folder / BAD).unlink()
    (folder / BAD).symlink_to(folder / path)
    assert dataset[1] == (2, 0)
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"skipped {folder / BAD}: cannot read: ")


def test_a_class_of_which_no_image_can_be_read_is_told(folder):
    for path in (folder / "dog").rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match="all images of class 'dog' are unreadable"):
        ImageFolder(folder, on_bad="skip")[8]


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_in_a_loaders_process_the_same_is_said(folder, on_bad, capfd):
    """Read as the trainer does, which raises the original error."""
    dataset = Samples(ImageFolder(folder, number_of, on_bad=on_bad), seed=0)
    loader = make_loader(dataset, 1, CPU, batch_size=4)
    try:
        if on_bad == "stop":
            with pytest.raises(UserError, match="invalid image") as error:
                list(read(loader))
            assert error.value.where == str(folder / BAD)
        else:
            images = [int(i) for numbers, _ in read(loader) for i in numbers]
            assert images[:4] == [0, 2, 2, 3] and len(images) == 16
            assert capfd.readouterr().err.count("skipped") == 1
    finally:
        end_workers(loader)


def test_what_the_runs_job_says_holds_unless_the_script_says_else(folder, tmp_path, monkeypatch):
    run = make_run(tmp_path / "job", data__on_bad="skip", data__retry_seconds=7.0)
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(run.path))
    dataset = ImageFolder(folder)
    assert dataset.on_bad == "skip" and dataset._reading._place.patience == 7
    dataset = ImageFolder(folder, on_bad="stop", retry_seconds=9)
    assert dataset.on_bad == "stop" and dataset._reading._place.patience == 9
    monkeypatch.delenv("HPCDDP_RUN_DIR")
    assert ImageFolder(folder).on_bad == "stop"


def test_words_that_are_no_policy_are_refused(folder):
    with pytest.raises(UserError, match="expected 'stop' or 'skip', got 'pass'"):
        ImageFolder(folder, on_bad="pass")
    with pytest.raises(JobFileError, match="one of stop, skip"):
        spec.KEYS.check("data.on_bad", "pass", "job.toml")


def test_samples_are_the_same_with_and_without_processes(folder):
    (folder / BAD).unlink()
    dataset = Samples(ImageFolder(folder, number_of), seed=3)
    wanted = [dataset[i] for i in range(15)]
    for workers in (0, 1):
        loader = DataLoader(dataset, batch_size=15, num_workers=workers)
        ((images, labels),) = list(loader)
        assert list(zip(images.tolist(), labels.tolist(), strict=True)) == wanted
