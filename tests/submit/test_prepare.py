"""A run dir for a plan: whole, or not there."""

import os

import pytest
from sites import Site, flags
from submitted import planned

from hpcddp import record
from hpcddp.errors import TemplateError
from hpcddp.planning import plan
from hpcddp.planning.asked import Asked
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


def test_each_run_of_a_plan_has_its_own_copy_of_the_code(site: Site) -> None:
    site.write("sub/train.py", "VALUE = 1\n")
    site.program("true", "exit 0")
    layer = flags(("command", ["true"]), ("name", "toy"), ("cluster", "local"))
    asked = Asked.read([layer], [], {})
    made = plan.make(asked, environ={}, folder=site.folder / "sub", runs=site.runs)
    first, second = (prepare.new_run(made, site.runs) for _ in range(2))
    (first.work / "train.py").unlink()
    for run in (first, second):
        assert record.read(run).workdir == str(run.work) == str(made.folder(run))
    assert (second.work / "train.py").read_text() == "VALUE = 1\n"
    layer.put("snapshot", False, "--no-snapshot")
    asked = Asked.read([layer], [], {})
    assert plan.make(asked, environ={}, folder=site.folder, runs=site.runs).code is None
