"""The reference of templates names what the shipped templates and scripts have."""

import re
from dataclasses import fields

from sites import Site, flags

from hpcddp.planning import resources
from hpcddp.planning.render import TemplateContext
from hpcddp.planning.template_facts import (
    ATTEMPT_VARIABLES,
    BLOCKS,
    FACTS,
    INNER_BLOCKS,
    VARIABLES,
)
from hpcddp.rundir import RunDir


def templates() -> str:
    """The shipped templates as one text."""
    return "".join(path.read_text() for path in resources.folder("templates").glob("*.j2"))


def test_every_block_of_the_templates_is_described() -> None:
    assert set(re.findall(r"{%-? block (\w+)", templates())) == {*BLOCKS, *INNER_BLOCKS}


def test_every_fact_of_a_template_is_described() -> None:
    assert {field.name for field in fields(TemplateContext)} | {"sbatch"} == set(FACTS)


def test_every_variable_of_a_script_is_described(site: Site) -> None:
    site.profile("mine", "software.modules = ['cuda']\nsoftware.setup = ['true']")
    written = set()
    image, runtime = ("software.container.image", "/torch"), "software.container.runtime"
    for environment in (
        [("software.conda", "train")],
        [("software.venv", "/venv")],
        [image, (runtime, "charliecloud")],
        [image, (runtime, "pyxis")],
    ):
        layer = flags(("cluster", "mine"), ("metrics.trackers", ["tensorboard"]), *environment)
        plan, run = site.plan(layer), RunDir("/runs/toy-1")
        text = plan.render(run, plan.worker_command(run))
        written |= set(re.findall(r"^readonly (?:-a )?(\w+)=", text, re.MULTILINE))
    assert written == set(VARIABLES)
    exported = re.search(r"^export (HPCDDP_ATTEMPT .*)$", templates(), re.MULTILINE)
    assert exported and set(exported[1].split()) == set(ATTEMPT_VARIABLES)
