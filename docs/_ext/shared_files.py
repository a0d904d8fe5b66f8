"""The files below share/ that a wheel brings beside the package. `scripts/share` makes them anew.

    man/man1/                           man pages, from the help
    bash-completion/, zsh/, fish/       completions, as click writes them
    hpcddp/schemas/                     JSON Schemas of job files and cluster profiles
    modulefiles/hpcddp/VERSION          an environment module

They lie in the repository, and setup.cfg names their places.
"""

from __future__ import annotations

from pathlib import Path

import man_pages
from click.shell_completion import get_completion_class

from hpcddp import __version__, cli
from hpcddp.cli import completion
from hpcddp.planning.project import new_job
from hpcddp.planning.site import detected

FOLDER = Path(__file__).parents[2] / "share"
COMPLETIONS = {
    "bash": "bash-completion/completions/hpcddp",
    "zsh": "zsh/site-functions/_hpcddp",
    "fish": "fish/vendor_completions.d/hpcddp.fish",
}
# Tcl, which Environment Modules and Lmod both read. A relative path would be of the current folder.
MODULE = """\
#%Module1.0
## hpcddp VERSION. This file finds the environment that it was installed into by its own place, so
## make a link to it in your folder of modules, or `module use` the folder above: do not copy it.

# The added name makes normalize follow a link in the last part, too.
set file [file dirname [file normalize [file join $ModulesCurrentModulefile name]]]
set prefix [file dirname [file dirname [file dirname [file dirname $file]]]]

proc ModulesHelp {} {
    puts stderr "hpcddp VERSION: distributed PyTorch training on Slurm. See hpcddp --help."
}
module-whatis "hpcddp VERSION: distributed PyTorch training on Slurm"

if {![file executable [file join $prefix bin hpcddp]]} {
    error "no bin/hpcddp in $prefix: make a link to the installed file instead of a copy"
}
conflict hpcddp
prepend-path PATH [file join $prefix bin]
# Without MANPATH, man looks beside each folder of PATH; with it alone, nowhere else.
if {[info exists env(MANPATH)]} {
    prepend-path MANPATH [file join $prefix share man]
}
# Where bash-completion and fish look for completions.
if {![info exists env(XDG_DATA_DIRS)]} {
    append-path XDG_DATA_DIRS /usr/local/share
    append-path XDG_DATA_DIRS /usr/share
}
prepend-path XDG_DATA_DIRS [file join $prefix share]
"""


def files() -> dict[str, str]:
    """Path below share/ -> text."""
    made = {f"man/man1/{name}": text for name, text in man_pages.pages().items()}
    completion.register()
    for shell, path in COMPLETIONS.items():
        complete = get_completion_class(shell)
        assert complete is not None
        made[path] = complete(cli.cli, {}, "hpcddp", "_HPCDDP_COMPLETE").source().strip() + "\n"
    made[f"hpcddp/schemas/{new_job.SCHEMA}"] = new_job.schema_text()
    made[f"hpcddp/schemas/{detected.SCHEMA}"] = detected.schema_text()
    made[f"modulefiles/hpcddp/{__version__}"] = MODULE.replace("VERSION", __version__)
    return made


def main() -> None:
    """Write the files, and remove those that are made no more."""
    made = {FOLDER / path: text for path, text in files().items()}
    for path in FOLDER.rglob("*"):
        if path.is_file() and path not in made:
            path.unlink()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
