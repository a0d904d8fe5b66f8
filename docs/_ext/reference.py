"""The directive ``{hpcddp} PART``: a part of the reference, made from the code.

A part is a function that gives Markdown, which is read in the directive's place. Each key, exit
code, file and so on is an object of the site: it has a link of its own, and the search finds it.
"""

from __future__ import annotations

import codes
import commands
import job_keys
import python_api
import rows
import run_folder
import script
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PARTS = {
    "commands": commands.text,
    "job-keys": job_keys.text,
    "cluster-keys": job_keys.cluster_text,
    "environment": job_keys.environment,
    "launchers": rows.launchers,
    "strategies": rows.strategies,
    "causes": codes.causes,
    "exit-codes": codes.commands,
    "rank-exit-codes": codes.ranks,
    "errors": codes.errors,
    "blocks": script.blocks,
    "facts": script.facts,
    "variables": script.variables,
    "run-folder": run_folder.text,
}
# Directive -> what an object of it is called in the search.
OBJECTS = {
    "job-key": "job key",
    "cluster-key": "cluster key",
    "exit-code": "exit code",
    "run-file": "file of a run folder",
}


class Part(SphinxDirective):
    """A part of the reference, by its name in PARTS."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in PARTS:
            raise self.error(f"unknown part {name!r}; there are: {', '.join(PARTS)}")
        text = "\n".join(PARTS[name]())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("hpcddp", Part)
    for name, text in OBJECTS.items():
        app.add_object_type(name, name, objname=text, indextemplate=f"pair: %s; {text}")
    python_api.setup(app)
    app.connect("sphinx-click-process-options", commands.grouped)
    for part in ("description", "options", "epilog"):
        app.connect(f"sphinx-click-process-{part}", commands.plain)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
