"""Which of the jobs at Slurm are a run's, and which of them counts."""

from sites import Site
from submitted import begun, queue, run_of, submitted

from hpcddp.rundir import RunDir
from hpcddp.slurm import commands as slurm
from hpcddp.submit import run_jobs


def test_a_job_is_found_by_whatever_path_names_its_folder(site: Site) -> None:
    run = submitted(run_of(site), None)
    link, other = site.folder / "link", run_of(site, "toy-2")
    link.symlink_to(site.runs)
    for command, ours in (
        (f"{link}/{run.name}/job.sbatch 3", True),
        (f"/var/spool/slurmd/job7/slurm_script 0 {run.path}/", True),
        (f"{link}/{other.name}/job.sbatch", False),
        ("/home/ann/job.sbatch", True),  # a rendered script, given to sbatch from anywhere
        ("", True),  # one from its standard input
    ):
        queue(site, f"7|PENDING|None|x|x||{command}|toy-1")
        assert bool(run_jobs.rows_of(run, slurm.queue())) is ours, command
        assert bool(run_jobs.rows_of(RunDir(link / run.name), slurm.queue())) is ours, command


def test_the_newest_job_counts(site: Site) -> None:
    run = begun(submitted(run_of(site)), job_id="7", began=20.0)
    assert run_jobs.current(run) == "7"
    begun(run, job_id="8", began=30.0)  # the same script, given to sbatch again
    assert run_jobs.current(run) == "8"
    submitted(run, "9", submitted=40.0)
    assert run_jobs.current(run) == "9"


def test_the_name_alone_tells_a_rendered_job_from_those_of_other_runs(site: Site) -> None:
    run, element = submitted(run_of(site)), run_of(site, "toy-2")
    for command, ours in (
        ("/var/spool/slurm_script 0", True),
        (f"/var/spool/slurm_script 3 {element.path}/ instead=5", False),
        (f"{element.script} 3", False),
    ):
        queue(site, f"9|RUNNING|None|x|x||{command}|{run.name}")
        assert bool(run_jobs.rows_of(run, slurm.queue())) is ours, command
