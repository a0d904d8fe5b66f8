from pathlib import Path

from sites import Site

from hpcddp.slurm import follow_up_jobs


def test_a_follow_up_begins_after_its_parent(site: Site) -> None:
    """It dies with one that leaves with 0; of one that is being ended it looks itself why."""
    log = site.folder / "asked"
    site.program("sbatch", f'echo "$*" >>{log}; echo "8;cluster"')
    script = Path("job.sbatch")
    assert follow_up_jobs.successor(script, ["2"], "7", ok=True, exclude="n1") == "8"
    assert follow_up_jobs.successor(script, ["2", "look"], "7", ok=False) == "8"
    assert log.read_text().splitlines() == [
        "--parsable --dependency=afterok:7 --kill-on-invalid-dep=yes --exclude=n1 --begin=now "
        "job.sbatch 2",
        "--parsable --dependency=afterany:7 --begin=now job.sbatch 2 look",
    ]


def test_a_follow_up_of_a_job_that_was_held_is_let_go(site: Site) -> None:
    """Its first job was submitted with --hold, and a person has released that."""
    site.program("sbatch", "echo 8")
    site.program("scontrol", f'echo "$*" >>{site.folder}/asked')
    script = site.write("job.sbatch", "#!/bin/bash\n#SBATCH --hold\n")
    assert follow_up_jobs.successor(script, ["2"], "7", ok=True) == "8"
    assert (site.folder / "asked").read_text() == "release 8\n"


def test_the_jobs_that_follow_an_attempt_are_known_by_their_command(site: Site) -> None:
    rows = ("9|PENDING|x|x|x||/r/a/job.sbatch 2 look|a", "8|PENDING|x|x|x||/r/a/job.sbatch 1|a",
            "7|RUNNING|x|x|x||/r/a/job.sbatch|a", "6|CANCELLED|x|x|x||/r/a/job.sbatch 2|a",
            "5|PENDING|x|x|x||/r/a_1/job.sbatch 2|a")  # fmt: skip
    site.program("squeue", "\n".join(f"echo '{row}'" for row in rows))
    assert follow_up_jobs.follow_ups(Path("/r/a/job.sbatch"), "a") == {"9": 2, "8": 1}


def test_a_job_that_a_follow_up_continues_is_not_requeued_too(site: Site) -> None:
    site.program("scontrol", f'echo "$*" >>{site.folder}/asked; exit 1')
    follow_up_jobs.end_for_good("7")
    (site.bin / "scontrol").unlink()
    follow_up_jobs.end_for_good("7")  # Slurm requeues it, and the follow-up waits
    assert (site.folder / "asked").read_text() == "update JobId=7 Requeue=0\n"
