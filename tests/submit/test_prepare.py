"""A run dir for a plan: whole, or not there."""

import os

import pytest
from sites import Site
from submitted import planned

from hpcddp import record
from hpcddp.errors import TemplateError
from hpcddp.submit import prepare


def test_nothing_is_made_where_the_script_cannot_be_rendered(site: Site) -> None:
    site.write("bad.sh.j2", "#!/bin/bash\n{{ oops }}\n")
    with pytest.raises(TemplateError):
        prepare.new_run(planned(site, template="bad.sh.j2"), site.runs)
    assert not site.runs.exists()


def test_a_rendered_run_has_its_script_and_its_job(site: Site) -> None:
    made = planned(site)
    run = prepare.new_run(made, site.runs)
    assert os.access(run.script, os.X_OK)
    job = record.read(run)
    assert (job.run, job.nodes, job.gpus_per_node) == (run.name, [2, 2], 4)
    assert sorted(p.name for p in run.path.iterdir()) == [
        "attempts", "host.pyz", "job.json", "job.sbatch",
    ]  # fmt: skip
