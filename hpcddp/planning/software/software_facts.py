"""[software] of a job -> facts and shell variables of its script.

The script prepares the software in the order of the keys, then the ranks' Python. If that is not
the Python of hpcddp, the ranks import the package from an archive in the run folder
(submit/package_archive.py), before the environment's own packages and without hiding any of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcddp.spec import SoftwareSpec


class SoftwareFacts(NamedTuple):
    """What a script prepares: a step for each that is true.

    Args:
        venv: the key of the virtual environment, venv or uv; "" for none.
        python: the ranks use another Python than that of hpcddp.
    """

    purge: bool = False
    modules: bool = False
    setup: bool = False
    conda: bool = False
    venv: bool = False
    uv: bool = False
    python: bool = False


def facts(software: SoftwareSpec) -> SoftwareFacts:
    return SoftwareFacts(
        purge=software.purge,
        modules=bool(software.modules),
        setup=bool(software.setup),
        conda=bool(software.conda),
        venv=bool(software.venv),
        uv=bool(software.uv),
        python=software.own_python,
    )


def variables(software: SoftwareSpec) -> Mapping[str, Any]:
    """The shell variables of the steps."""
    rows = {
        "MODULES": software.modules,
        "SETUP": software.setup,
        "CONDA": software.conda,
        "VENV": environment(software),
    }
    return {name: value for name, value in rows.items() if value}


def environment(software: SoftwareSpec) -> str:
    """The folder of the virtual environment; "" for none."""
    return f"{software.uv}/.venv" if software.uv else software.venv


def python(software: SoftwareSpec) -> str:
    """The ranks' Python; that of a conda environment is first on PATH once it is active."""
    if folder := environment(software):
        return f"{folder}/bin/python"
    return "python" if software.conda else sys.executable
