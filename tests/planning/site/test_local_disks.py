"""Folders on a disk of this machine, which the nodes may not see."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from sites import Site, record_run

from hpcddp.errors import ClusterError
from hpcddp.planning.site import local_disks, site_facts
from hpcddp.planning.site.site_facts import CheckUp, SiteFacts
from hpcddp.rundir import RunDir, write_json
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.spec import ContainerSpec, JobSpec, SoftwareSpec, to_dict

KINDS = [NodeKind("gpu", True, 2, 8, 1, 1000, (), (), "n[1-2]")]
SHARED = {"/": "ext4", "/home": "nfs4", "/scratch": "lustre", "/data": "xfs"}


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_disks, "mounts", lambda: SHARED)
    monkeypatch.setattr("sys.prefix", "/home/ada/venv")


def said(
    runs: str | Path, job: JobSpec | None = None, environ: Iterable[str] = (),
    facts: SiteFacts | None = None,
) -> list[str]:  # fmt: skip
    variables = dict.fromkeys(environ, "x")
    folder = Path("/home/ada")
    return local_disks.check(job or JobSpec(), folder, Path(runs), KINDS, facts, variables)


def test_the_type_of_the_file_system_tells(mounted: None) -> None:
    assert said("/scratch/ada/runs") == said("/home/ada/runs") == []
    assert said("/var/runs") == [
        "the nodes may not see the folder of the runs: /var/runs is on a disk of this machine "
        "(ext4, mounted at /)"
    ]


def test_environment_and_working_folder_count(
    mounted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", "/data/venv")
    (only,) = said("/home/ada/runs")
    assert "the Python environment: /data/venv is on a disk of this machine (xfs, " in only
    job = JobSpec(command=["python", "train.py"])
    assert said("/home/ada/runs", job) == [only]


@pytest.mark.parametrize(
    ("job", "what"),
    [
        (JobSpec(software=SoftwareSpec(venv="/data/venv")), "the Python environment: /data/venv"),
        (JobSpec(software=SoftwareSpec(uv="/data/p")), "the Python environment: /data/p/.venv"),
        (JobSpec(software=SoftwareSpec(conda="/data/c")), "the Python environment: /data/c"),
        (JobSpec(software=SoftwareSpec(conda="torch")), ""),
        (JobSpec(software=SoftwareSpec(container=ContainerSpec(image="/data/torch.sif"))),
         "the container image: /data/torch.sif"),
        (JobSpec(software=SoftwareSpec(container=ContainerSpec(image="pytorch:2.9"))), ""),
        (JobSpec(task="/data/jobs/toy.py"), "its code: /data/jobs is"),
    ],
)  # fmt: skip
def test_own_software_and_code_count(mounted: None, job: JobSpec, what: str) -> None:
    rows = said("/home/ada/runs", job)
    assert (not rows) if not what else (what in rows[0] and len(rows) == 1)


def test_paths_in_a_command_count_but_for_the_nodes_own_tmp(mounted: None, tmp_path: Path) -> None:
    job = JobSpec(command=["python", "train.py", f"--data={tmp_path}", "--scratch=/tmp"])
    (only,) = said("/home/ada/runs", job)
    assert f"its code: {tmp_path} is on" in only


def begun(path: Path, job: JobSpec | None = None) -> None:
    """A run that has begun on a node."""
    run = RunDir(path)
    run.attempt(1).path.mkdir(parents=True)
    record_run(run, spec=to_dict(job or JobSpec()), workdir="/home/ada")
    write_json(run.attempt(1).facts, {"slurm": True})


def test_what_a_run_on_the_nodes_used_is_seen_there(mounted: None, tmp_path: Path) -> None:
    assert len(said(tmp_path)) == 1
    begun(tmp_path / "toy-1")
    write_json(RunDir(tmp_path / "toy-1").attempt(1).facts, {"slurm": False})
    assert len(said(tmp_path)) == 1  # a run of this machine
    begun(tmp_path / "toy-2")
    assert said(tmp_path) == []
    job = JobSpec(software=SoftwareSpec(venv="/data/venv"))
    assert "/data/venv" in said(tmp_path, job)[0]
    begun(tmp_path / "toy-3", job)
    assert said(tmp_path, job) == []


ENDED = (
    ", and job 42 of toy-2 has ended without an attempt\n"
    "  use a folder that all nodes see, or check this one with `hpcddp doctor --runs "
)


@pytest.mark.parametrize(
    ("squeue", "given", "named"),
    [
        ("", {}, True),
        ("echo '42|FAILED|NonZeroExitCode|5|6|n1|x|toy-2'", {}, True),
        ("echo '42|RUNNING|None|5|6|n1|x|toy-2'", {}, False),
        ("echo '42|PENDING|Priority|5|N/A||x|toy-2'", {}, False),
        ("echo '42|CANCELLED|None|5|6||x|toy-2'", {}, False),
        ("echo 'Unable to contact x' >&2; exit 1", {}, False),
        ("", {"backend": "local"}, False),
        ("", {"job_id": None}, False),
    ],
)
def test_the_warning_names_a_run_whose_job_ended_without_an_attempt(
    mounted: None, site: Site, squeue: str, given: dict[str, str | None], named: bool
) -> None:
    site.program("squeue", squeue)
    run = record_run(made(site.runs / "toy-2"))
    write_json(run.submission, {"backend": "slurm", "job_id": "42"} | given)
    (text,) = said(site.runs)
    assert text.startswith("the nodes may not see the folder of the runs: ")
    assert text.endswith(f"{ENDED}{site.runs}`") is named
    assert ("\n" in text) is named


def test_a_run_that_a_person_ended_or_that_began_is_not_named(mounted: None, site: Site) -> None:
    site.program("squeue", "exit 0")
    run = record_run(made(site.runs / "toy-2"))
    write_json(run.submission, {"backend": "slurm", "job_id": "42"})
    write_json(run.request, {"want": "cancel", "job_id": "42"})
    assert ENDED not in said(site.runs)[0]
    run.request.unlink()
    assert ENDED in said(site.runs)[0]
    begun(site.runs / "toy-2")
    assert said(site.runs) == []


def made(path: Path) -> RunDir:
    """A run's folder."""
    run = RunDir(path)
    run.create()
    return run


def test_what_a_check_up_found_missing_is_refused_until_one_sees_it(
    mounted: None, tmp_path: Path
) -> None:
    profile = tmp_path / "site.toml"

    def checked(moment: float, seen: dict[str, bool]) -> SiteFacts:
        found = {Path(path): sees for path, sees in seen.items()}
        site_facts.add_check_up(profile, CheckUp(moment, found))
        facts = site_facts.load(profile)
        assert facts
        return facts

    site_facts.save(profile, SiteFacts("c", "24.11", 0.0))
    facts = checked(1.0, {"/scratch/ada": False, "/home/ada": True})
    assert said("/home/ada/runs", facts=facts) == said("/scratch/eve", facts=facts) == []
    own = JobSpec(software=SoftwareSpec(venv="/scratch/ada/venv"))
    for runs, job, what in (
        ("/scratch/ada/runs", JobSpec(), "the nodes do not see the folder of the runs"),
        ("/home/ada/runs", own, "the nodes do not see the Python environment"),
    ):
        with pytest.raises(ClusterError, match=what) as error:
            said(runs, job, facts=facts)
        assert "hpcddp doctor --runs /scratch/ada" in error.value.hint
    assert checked(0.5, {"/scratch/ada": True}).unseen == ["/scratch/ada"]  # an older one
    assert said("/scratch/ada/runs", facts=checked(2.0, {"/scratch/ada/runs": True})) == []


def test_on_a_sandbox_the_nodes_are_this_machine(mounted: None) -> None:
    assert said("/var/runs", environ=["HPCDDP_SANDBOX"]) == []


def test_the_mounts_of_this_machine_are_read() -> None:
    assert local_disks.mounts()["/proc"] == "proc"
