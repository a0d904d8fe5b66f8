from pathlib import Path

from sites import Site

from hpcddp.slurm import sbatch


def test_sbatch_that_is_installed_but_not_configured_does_not_answer(site: Site) -> None:
    assert not sbatch.answers()
    site.program("sbatch", "exit 1")
    assert not sbatch.answers()
    site.program("sbatch", "exit 0")
    assert sbatch.answers()


def test_the_verdict_is_slurms_words(site: Site) -> None:
    site.program("sbatch", 'cat >seen; echo "allocation failure: no such partition" >&2; exit 1')
    assert sbatch.verdict("#!/bin/bash\n") == (False, "allocation failure: no such partition")
    assert Path("seen").read_text() == "#!/bin/bash\n"
    site.program("sbatch", 'echo "sbatch: Job 7 to start at 2030-01-01" >&2')
    assert sbatch.verdict("") == (True, "Job 7 to start at 2030-01-01")
    said = "echo 'sbatch: Your project is proj_a' >&2; "
    site.program("sbatch", said + "echo 'sbatch: Job 7 to start at 2030-01-01' >&2")
    assert sbatch.verdict("") == (True, "Job 7 to start at 2030-01-01")
    site.program("sbatch", said + "echo 'sbatch: error: no account' >&2; exit 1")
    assert sbatch.verdict("") == (False, "Your project is proj_a; no account")


def test_an_option_that_this_release_lacks_is_a_refusal() -> None:
    words = (
        "sbatch: unrecognized option '--tres-bind=x'\nTry \"sbatch --help\" for more information"
    )
    refused = sbatch.refusal(words, Path("job.sbatch"))
    assert refused and refused.what == (
        "sbatch refused the job: unrecognized option '--tres-bind=x'"
    )
    assert sbatch.refusal("sbatch: Submitted", Path("job.sbatch")) is None
