import errno
import json
import subprocess
from collections.abc import Callable

import pytest
from earlier import earlier_run
from sites import COMMAND, Outcome, Site, nodes, record_run
from submitted import begun

from hpcddp.planning.site import site_facts
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.rundir import RunDir, write_json

Command = Callable[..., Outcome]
DISK = {"free": 10**12, "size": 10**12, "free_files": 0, "files": 0}


def test_a_check_up_of_two_ranks_on_this_machine(site: Site, command: Command) -> None:
    done = command("doctor", "--cluster", "local", "--procs", "2")
    assert done.code == 0, done.text
    assert "Slurm     not found\n" in done.out and "GFLOP/s for each of 2 ranks\n" in done.out
    assert "ALL-REDUCE" in done.out and "BUS BANDWIDTH" in done.out
    assert "note: checking 1 node, 2 ranks each: job " in done.err
    again = command("doctor", "--results", "last", "--json")
    facts = json.loads(again.out)
    assert again.code == 0 and len(facts["nodes"]["ranks"]) == 2 and facts["here"] is None
    assert all(row["visible"] is not None for row in facts["nodes"]["ranks"])
    assert facts["nodes"]["device"] == "cpu"


def checked_up(site: Site, name: str, moment: float, visible: float | None, count: int = 2) -> None:
    """A check-up of some nodes, the last of which may not see the runs."""
    run = RunDir(site.runs / name)
    run.path.mkdir(parents=True)
    profile = site.config / "hpcddp" / "clusters" / "own.toml"
    record_run(run, cluster=str(profile), spec={"command": ["python"], "device": "cpu"})
    head = {"import_seconds": 80.0, "visible": 0.0, "clock": 0.0, "home": True, "torch": "2.9",
            "python": "3.11.2", "architecture": "x", "libc": "g", "address": "10.0.0.1",
            "open_files": None, "folder": DISK, "tmp": DISK, "writes": {"median": 0.1},
            "unreachable": {}, "gpus": []}  # fmt: skip
    rows = [head | {"rank": node, "node": node, "host": f"n{node}"} for node in range(count)]
    rows[-1]["visible"] = visible
    write_json(run.path / "doctor.json", {
        "ranks": rows, "time": moment, "backend": "gloo", "rates": [1e12] * 2, "slow": {},
        "pairs": [], "all_reduce": [],
    })  # fmt: skip


def test_later_jobs_know_what_a_check_up_found(site: Site, hpcddp: Command) -> None:
    site.slurm(scontrol="echo 'PartitionName=gpu Default=YES'", sinfo=nodes(("gpu*", 8, "(null)")))
    site_facts.save(site.profile("own", ""), SiteFacts("own", "24.11", 0.0))
    submit = ("submit", "toy", "--cluster", "own", "--dry-run")
    checked_up(site, "doctor-1", 1e9, visible=None)
    assert hpcddp("doctor", "--results", "doctor-1").code == 1
    refused = hpcddp(*submit)
    assert refused.code == 2 and "the nodes do not see the folder of the runs" in refused.err
    assert f"`hpcddp doctor` found {site.runs} missing there" in refused.err
    earlier_run(site, save=1.0, run="toy-1")
    resume = ("resume", "toy-1", "--cluster", "own", "--dry-run")
    refused = hpcddp(*resume)
    assert refused.code == 2 and "the nodes do not see the folder of the runs" in refused.err
    checked_up(site, "doctor-2", 2e9, visible=0.1)
    assert hpcddp("doctor", "--results", "doctor-2").code == 0
    done = hpcddp(*submit)
    assert done.code == 0, done.text
    assert "warning: the import of torch took 80 s in `hpcddp doctor`" in done.err
    done = hpcddp(*resume)
    assert done.code == 0, done.text


def test_a_check_up_whose_job_does_not_find_its_run_is_kept(site: Site, hpcddp: Command) -> None:
    once = "[ -e asked ] && exit; touch asked; name=${!#}"
    running = f'{once}; echo "42|RUNNING|None|x|x|||${{name#--name=}}"'
    site.slurm(scontrol="echo 'PartitionName=gpu Default=YES'", sacct="exit 0", squeue=running,
               sinfo=nodes(("gpu*", 8, "(null)")))  # fmt: skip
    path = site.profile("own", "poll_seconds = 1")
    site_facts.save(path, SiteFacts("own", "24.11", 0.0))
    done = hpcddp("doctor", "--cluster", "own", "--procs", "1")
    assert done.code == 1 and f"the nodes do not see {site.runs}" in done.err, done.text
    assert LOST not in done.err
    assert "do not see the folder of the runs" in hpcddp("submit", "toy", "--cluster", "own").err


LOST = "note: the results are not kept for later jobs: "


def test_results_that_no_later_job_will_know_are_said_to_be_lost(
    site: Site, hpcddp: Command
) -> None:
    facts = site.profile("own", "").with_suffix(".json")
    checked_up(site, "doctor-1", 1e9, visible=None)
    done = hpcddp("doctor", "--results", "doctor-1")
    assert f"{LOST}{facts} does not exist\n  run `hpcddp cluster detect` first" in done.err
    facts.write_text("{")
    assert f"{LOST}{facts} is damaged" in hpcddp("doctor", "--results", "doctor-1").err
    site_facts.save(facts.with_suffix(".toml"), SiteFacts("own", "24.11", 0.0))
    assert LOST not in hpcddp("doctor", "--results", "doctor-1").err
    checked_up(site, "doctor-0", 5e8, visible=None)  # older than the one that is kept
    assert LOST not in hpcddp("doctor", "--results", "doctor-0").err


def test_facts_that_cannot_be_written_are_said_to_be_lost(
    site: Site, hpcddp: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = site.profile("own", "").with_suffix(".json")
    site_facts.save(facts.with_suffix(".toml"), SiteFacts("own", "24.11", 0.0))

    def refuse(*words: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(site_facts, "write_text", refuse)
    checked_up(site, "doctor-1", 1e9, visible=0.1)
    done = hpcddp("doctor", "--results", "doctor-1")
    assert f"{LOST}cannot write {facts}: Read-only file system" in done.err


def test_bad_nodes_are_noted_by_the_clusters_name_at_slurm(site: Site, hpcddp: Command) -> None:
    """Not by the profile's, which another cluster with the same home may use too."""
    site.slurm()
    site.profile("own", "")
    checked_up(site, "doctor-1", 1e9, visible=0.1)
    run = RunDir(site.runs / "doctor-1")
    run.attempts.mkdir()
    begun(run, site={"cluster": "lab"})
    results = run.path / "doctor.json"
    bad_gpu = '"gpus": [{"ecc_errors": "1", "driver": "550"}]'
    results.write_text(results.read_text().replace('"gpus": []', bad_gpu, 1))
    done = hpcddp("doctor", "--results", "doctor-1")
    assert "note: new jobs avoid n0 for some time" in done.err, done.text
    books = site.config / "hpcddp" / "clusters"
    assert [path.name for path in books.glob("*.nodes/*.json")] == ["n0.json"]
    assert (books / "lab.nodes" / "n0.json").exists()


def test_many_nodes_are_not_measured_in_pairs(site: Site, hpcddp: Command) -> None:
    site.profile("own", "")
    checked_up(site, "doctor-1", 1e9, visible=0.1, count=65)
    done = hpcddp("doctor", "--results", "doctor-1")
    assert "note: links are measured between at most 64 nodes, not 65" in done.err, done.text


def test_here_alone_submits_nothing(site: Site, command: Command) -> None:
    done = command("doctor", "--here")
    assert done.code == 0 and "torch     2." in done.out
    assert not site.runs.exists()


def test_a_low_limit_on_open_files_is_found(site: Site) -> None:
    done = subprocess.run(
        ["/bin/bash", "-c", f"ulimit -n 256; exec {COMMAND} doctor --here"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "warning: here: a process may open 256 files\n" in done.stdout
    assert "ulimit -n 4096" in done.stdout and done.returncode == 0


def test_ranks_that_leave_no_results_are_an_error_with_the_way_on(
    site: Site, command: Command
) -> None:
    site.write("sitecustomize.py", "import sys; sys.modules['torch'] = None")
    done = command("doctor", "--cluster", "local", "--procs", "1", PYTHONPATH=str(site.folder))
    assert done.code == 1, done.text
    assert "its ranks have written no results" in done.err and "hpcddp why doctor-" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--results", "none"], "no run"),
        (["--nodes", "0", "--cluster", "local"], "less than 1 node"),
        (["--strategy", "ddp"], "`doctor` has a job of its own"),
        (["--here", "--results", "last"], "--here: conflicts with --results"),
        (["--here", "-N", "2"], "--here: conflicts with --nodes"),
    ],
)
def test_a_mistake_is_refused(site: Site, hpcddp: Command, words: list[str], message: str) -> None:
    done = hpcddp("doctor", *words)
    assert done.code in (1, 2) and message in done.err and "Traceback" not in done.err
    assert not site.runs.exists()
