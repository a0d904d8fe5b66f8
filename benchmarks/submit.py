"""`hpcddp submit --detach` beside an import of its libraries and sbatch of a finished script.

Whole processes on a real Slurm, with the profile that `hpcddp cluster detect` writes. The floor is
the least cost of a submission with these libraries: their import, and one sbatch of a script from
`hpcddp render`. Jobs are submitted with --hold, so that none runs. They are cancelled after each
measurement, which is not timed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output

JOB = ["--nodes", "2", "--gpus", "4", "--sbatch", "hold=true"]
LIMIT = 2.0
LIBRARIES = [PYTHON, "-c", "import click, jinja2, submitit"]


def rows(site: Site) -> Iterator[Row]:
    script = site.fresh() / "job.sbatch"
    script.write_text(output([HPCDDP, "render", *JOB], site.slurm, script.parent))

    environ = site.slurm | {"XDG_CONFIG_HOME": str(site.fresh())}
    output([HPCDDP, "cluster", "detect"], environ, site.folder)

    def ours() -> str:
        said = output([HPCDDP, "submit", *JOB, "--detach"], environ, site.fresh())
        job_id: str = re.findall(r"^job +(\d+)$", said, re.MULTILINE)[0]
        return job_id

    def floor() -> str:
        output(LIBRARIES, site.slurm, site.folder)
        return output(["sbatch", "--parsable", str(script)], site.slurm, site.folder)

    taken = site.interleave("submit", lambda: _timed(site, ours), lambda: _timed(site, floor))
    yield Row("submit", taken[0], taken[1], ratio_limit=LIMIT)


def _timed(site: Site, submit: Callable[[], str]) -> float:
    """Seconds until a job is in the queue."""
    began = time.perf_counter()
    job_id = submit()
    seconds = time.perf_counter() - began
    site.slurm_says("scancel", job_id)
    return seconds
