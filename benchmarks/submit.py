"""`hpcddp submit --detach` beside an import of its libraries and sbatch of a finished script.

Whole processes on a real Slurm, without a limit. The floor is the least cost of a submission with
these libraries: their import, and one sbatch of a script from `hpcddp render`. Jobs are submitted
with --hold, so that none runs. They are cancelled after each measurement, which is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output

JOB = ["--nodes", "2", "--gpus", "4", "--sbatch", "hold=true"]
LIBRARIES = [PYTHON, "-c", "import click, jinja2, submitit"]


def rows(site: Site) -> Iterator[Row]:
    script = site.fresh() / "job.sbatch"
    script.write_text(output([HPCDDP, "render", *JOB], site.slurm, script.parent))

    def ours() -> str:
        return output([HPCDDP, "submit", *JOB, "--detach", "--parsable"], site.slurm, site.fresh())

    def floor() -> str:
        output(LIBRARIES, site.slurm, site.folder)
        return output(["sbatch", "--parsable", str(script)], site.slurm, site.folder)

    taken = site.interleave("submit", lambda: _timed(site, ours), lambda: _timed(site, floor))
    yield Row("submit", taken[0], taken[1])


def _timed(site: Site, submit: Callable[[], str]) -> float:
    """Seconds until a job is in the queue."""
    began = time.perf_counter()
    job_id = submit()
    seconds = time.perf_counter() - began
    site.slurm_says("scancel", job_id)
    return seconds
