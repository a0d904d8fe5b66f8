"""`hpcddp render` of a job on 2 x 4 ranks beside a Python that imports click and jinja2.

Whole processes. The floor renders one line from a string; `render` also reads job and profile,
checks the plan, and makes a run directory, a new one in a new folder each time. The limit is for a
machine whose Slurm does not answer; the second row, for information, includes the questions to a
Slurm that does.
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
