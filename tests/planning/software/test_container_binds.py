"""What a container sees of the host."""

from pathlib import Path

import pytest

from hpcddp.errors import UserError
from hpcddp.planning.software import container_binds
from hpcddp.spec import ContainerSpec, JobSpec, SoftwareSpec


def bound(job: JobSpec, folder: Path) -> list[str]:
    """The folders that are bound under their own paths."""
    pairs = [bind.split(":") for bind in container_binds.of(job, folder / "runs", folder, ())]
    assert all(source == target for source, target, *_ in pairs)
    return [source for source, *_ in pairs]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder to work in, beside data."""
    (tmp_path / "home/runs").mkdir(parents=True)
    (tmp_path / "lustre/images").mkdir(parents=True)
    (tmp_path / "lustre/words.txt").touch()
    return tmp_path / "home"


def test_a_folder_is_bound_once_with_what_lies_in_it(home: Path) -> None:
    assert bound(JobSpec(), home) == [str(home)]


def test_what_links_lead_to_is_bound_too(home: Path) -> None:
    (home / "data").symlink_to(home.parent / "lustre/images")
    (home / "inside").symlink_to(home / "runs")
    (home / "gone").symlink_to("/nowhere")
    assert bound(JobSpec(), home) == [str(home), str(home.parent / "lustre/images")]


def test_links_deep_in_a_folder_and_behind_links_are_followed(home: Path) -> None:
    far, images = home.parent / "far", home.parent / "lustre/images"
    far.mkdir()
    (home / "data/train").mkdir(parents=True)
    (home / "data/train/images").symlink_to(images)
    (images / "more").symlink_to(far)
    assert bound(JobSpec(), home) == [str(far), str(home), str(images)]


def test_a_link_in_a_circle_is_left_alone(home: Path) -> None:
    (home / "x").symlink_to("x")
    (home / "up").symlink_to(home)
    assert bound(JobSpec(), home) == [str(home)]


def test_programs_of_the_host_do_not_hide_those_of_the_image(home: Path) -> None:
    (home / "venv/bin").mkdir(parents=True)
    (home / "venv/bin/python").symlink_to("/usr/bin/python3")
    assert bound(JobSpec(), home) == [str(home)]


def test_a_folder_behind_a_link_is_bound_under_both_names(home: Path) -> None:
    other = home.with_name("link")
    other.symlink_to(home)
    assert bound(JobSpec(), other) == [str(home), str(other)]


def test_paths_of_the_job_are_bound(home: Path) -> None:
    lustre = home.parent / "lustre"
    job = JobSpec(command=["python", "train.py", f"--data={lustre}/images", "/usr/bin/env", "/"])
    job.dataset = {"root": f"{lustre}/words.txt", "store": "s3://bucket/x", "size": 3}
    assert bound(job, home) == [str(home), str(lustre)]


def test_own_binds_come_last_and_as_they_are(home: Path) -> None:
    job = JobSpec(software=SoftwareSpec(container=ContainerSpec(binds=["/a", "/b:/c:ro"])))
    binds = container_binds.of(job, home / "runs", home, ["/tmp"])
    assert binds[-2:] == ["/a:/a", "/b:/c:ro"] and "/tmp:/tmp" in binds


def test_a_path_that_no_runtime_takes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    with pytest.raises(UserError, match="a colon or a comma"):
        container_binds.of(JobSpec(), tmp_path / "a:b/runs", tmp_path / "a:b", ())
