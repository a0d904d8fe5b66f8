"""`hpcddp render` of a job on 2 x 4 ranks beside a Python that imports click and jinja2.

Whole processes. The floor renders one line from a string. `render` also reads the job file and the
cluster profile, checks the plan, and makes a run folder in a new folder each time. The limit is for
a machine without Slurm. The second row has no limit: it includes the requests to a real Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, wall

LIMIT = 1.6
ONE_LINE = """
import click, jinja2
click.echo(jinja2.Template("#SBATCH --nodes={{ nodes }}").render(nodes=2))
"""


def rows(site: Site) -> Iterator[Row]:
    yield _row(site, "render", site.environ, LIMIT)
    yield _row(site, "render+Slurm", site.slurm, None)


def _row(site: Site, name: str, environ: Mapping[str, str], limit: float | None) -> Row:
    render = [HPCDDP, "render", "--nodes", "2", "--gpus", "4"]
    ours, floor = site.interleave(
        name,
        lambda: wall(render, environ, site.fresh()),
        lambda: wall([PYTHON, "-c", ONE_LINE], environ, site.fresh()),
    )
    return Row(name, ours, floor, ratio_limit=limit)
