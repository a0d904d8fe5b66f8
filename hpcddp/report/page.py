"""Step 13: views of runs -> one HTML file that is complete and cannot fetch anything.

The data of runs is untrusted. It stands in a JSON block, and the script puts it on the page as
text. The page's policy allows only these scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from hpcddp.errors import UserError
from hpcddp.report.downsample import SIZES, shown

LIMIT = 300_000  # bytes of a page
MARK = '<meta name="generator" content="hpcddp report">'  # near the beginning of each page
SCRIPTS = ("words.js", "charts.js", "attempts.js", "ranks.js", "tables.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")
START = """
const held = document.getElementById("data");
if (held) hpcddp.draw(document.getElementById("page"), JSON.parse(held.textContent));
"""


def page(runs: list[dict[str, Any]]) -> str:
    """The HTML of one run, or of several side by side.

    Args:
        runs: of each run ``Viewer(run).look().to_dict() | static(run)``.

    Raises:
        UserError: the page is too large even in its smallest size.
    """
    for size in SIZES:
        text = _rendered(json_text(shown(runs, size)), _title(runs))
        if len(text.encode()) < LIMIT:
            return text
    runs_ = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    message = f"the page of {runs_} would be larger than {LIMIT // 1000} kB"
    raise UserError(message, hint="put fewer runs on one page")


def _title(runs: list[dict[str, Any]]) -> str:
    names = [str(run["status"]["run"])[:100] for run in runs]
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names[:4])}"
    return title.encode("utf-8", "replace").decode()


def json_text(data: Any) -> str:
    """JSON that is safe inside a script element, with any text in it.

    Raises:
        ValueError: a number in it is NaN or infinite.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates of a file's name


@cache
def asset(name: str) -> str:
    """The text of a file of the page."""
    return files("hpcddp.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """The page's own script: ``hpcddp.draw(root, data)`` draws the data of `shown`. Called again,
    it updates the page in place.
    """
    body = "\n".join(map(asset, SCRIPTS))
    return f'globalThis.hpcddp = (() => {{\n"use strict";\n{body}\nreturn {{ draw }};\n}})();\n'


@cache
def style() -> str:
    """The page's style."""
    return "\n".join(map(asset, STYLES))


def policy(scripts: tuple[str, ...], styles: tuple[str, ...]) -> str:
    """A Content-Security-Policy that allows these texts and nothing else."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "img-src data:",
            "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _rendered(data: str, title: str) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    scripts = (asset("uPlot.iife.min.js"), script(), START)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(asset("page.html.j2")).render(
        mark=Markup(MARK),
        title=title,
        policy=policy(scripts, (style(),)),
        style=Markup(style()),
        scripts=[Markup(text) for text in scripts],
        data=Markup(data),
    )
