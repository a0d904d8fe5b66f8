"""The site: it is built as scripts/docs builds it, and all of the reference is in it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pages
import pytest
from browser import Seen, browser, look
from sites import CHECKOUT
from sphinx_site import DOCS, WORDS, build, site

from hpcddp import cli, spec
from hpcddp.attempt import decision
from hpcddp.launch.launchers import LAUNCHERS
from hpcddp.planning import clusters, template_facts
from hpcddp.rundir import AttemptDir, RunDir
from hpcddp.strategy import STRATEGIES

__all__ = ["browser", "look", "site"]
PAGES = [page.relative_to(DOCS).with_suffix("") for page in pages.pages() if DOCS in page.parents]
sys.path.insert(0, str(DOCS / "_ext"))

import inner_links  # noqa: E402

pytestmark = pytest.mark.xdist_group("site")  # one of the processes builds it


def text(page: Path) -> str:
    """What a page shows."""
    shown: list[str] = []

    class Shown(HTMLParser):
        def handle_data(self, data: str) -> None:
            shown.append(data)

    Shown().feed(page.read_text(encoding="utf-8"))
    return " ".join(" ".join(shown).split())


def test_each_page_is_reached_from_the_first(site: Path) -> None:
    seen, left = set(), [site / "index.html"]
    while left:
        page = left.pop()
        if page not in seen:
            seen.add(page)
            links = [link.partition("#")[0] for link in inner_links.Page(page).links]
            left += [
                path
                for link in links
                if link.endswith(".html") and (path := (page.parent / link).resolve()).is_file()
            ]
    missing = {str(page) for page in PAGES if (site / page).with_suffix(".html") not in seen}
    assert missing == set()


def test_each_page_stands_in_the_contents(site: Path) -> None:
    """The tree beside each page names all others."""
    tree = re.search(r'class="sidebar-tree".*?</aside>', (site / "tutorial.html").read_text(), re.S)
    assert tree
    names = set(re.findall(r'href="([^"#]*)\.html"', tree[0])) | {"index", "tutorial"}
    assert {str(page) for page in PAGES} <= names


def test_the_site_asks_no_network(site: Path) -> None:
    """Neither to show itself nor to be built: no page loads a thing from elsewhere."""
    loads = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\ssrc=["'](?:https?:)?//[^"']+"""
        r"""|<link[^>]*rel=["'](?:stylesheet|preconnect|preload|icon)["'][^>]*href=["'](?:https?:)?//[^"']+"""
        r"""|@import[^;]*//[^;]+|url\(["']?(?:https?:)?//[^)]+"""
    )
    outside = [
        f"{path.relative_to(site)}: {match[0]}"
        for path in site.rglob("*")
        if path.suffix in (".html", ".css")
        for match in loads.finditer(path.read_text(encoding="utf-8"))
    ]
    assert outside == []


def test_each_key_has_its_place(site: Path) -> None:
    for name, keys, prefix in (("job", spec.KEYS, ""), ("cluster", clusters.KEYS, "cluster-")):
        page = inner_links.Page(site / "reference" / f"{name}-keys.html")
        shown = text(site / "reference" / f"{name}-keys.html")
        wanted = {f"{prefix}key-{key}".replace(".", "-").replace("_", "-") for key in keys.rows}
        assert wanted <= {place.replace(".", "-").replace("_", "-") for place in page.places}
        for row in keys.rows.values():
            assert row.text.replace("`", "")[1:] in shown
            assert all(choice in shown for choice in row.choices)


def test_each_command_and_option_is_there(site: Path) -> None:
    shown = text(site / "reference" / "commands.html")
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(cli.cli.commands)
    for name, entry in cli.cli.commands.items():
        assert f"hpcddp {name}" in shown
        options = [word for option in entry.load().params for word in option.opts]
        assert all(word in shown for word in options if word.startswith("-"))


def test_each_file_of_a_run_folder_is_there(site: Path) -> None:
    shown = text(site / "reference" / "run-folder.html")
    run = RunDir("runs/a")
    paths = {path for folder in (run, AttemptDir(run.path / "attempts" / "1"))
             for path in vars(folder).values() if isinstance(path, Path)}  # fmt: skip
    paths -= {run.path, run.path / "attempts" / "1"}
    assert {path.name for path in paths if path.name not in shown} == set()


def test_each_table_is_there(site: Path) -> None:
    jobs, codes = (text(site / "reference" / f"{n}.html") for n in ("job-keys", "exit-codes"))
    assert all(name in jobs for name in (*LAUNCHERS, *STRATEGIES))
    assert all(name in codes for name in decision.CAUSES)
    assert all(str(code) in codes for code in cli.EXIT_CODES)
    templates = text(site / "reference" / "templates.html")
    for names in (template_facts.BLOCKS, template_facts.FACTS, template_facts.VARIABLES):
        assert all(name in templates for name in names)


def test_the_python_names_are_there(site: Path) -> None:
    places = inner_links.Page(site / "reference" / "python.html").places
    names = "attach init Run Run.batches Run.step Sampler submit_result lightning.Preemptible"
    names += " transformers.Preemptible data.ImageFolder dask.run dask.DaskResultsHandler"
    assert {f"hpcddp.{name}" for name in names.split()} <= places


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_the_first_pages(
    site: Path, look: Callable[..., Seen], width: int, scheme: str
) -> None:
    seen = look(width, color_scheme=scheme)
    for name in ("index", "tutorial"):
        tab = seen.open(site / f"{name}.html")
        assert tab.locator("h1").is_visible() and seen.too_wide() == 0
    assert all(url.startswith("file:") for url in seen.requests)
    seen.clean()
    assert [line for line in seen.violations() if line.startswith("color-contrast")] == []


def test_links_that_lead_nowhere_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html">, <a href="b.html#x">, <a href="b.html#y">, <a href="c.html">, '
        '<a href="#z">, <a href="https://example.org/#q">, <img src="d.png"><p id="here">'
    )
    (tmp_path / "b.html").write_text('<p id="x">')
    assert list(inner_links.broken(tmp_path)) == [
        "a.html: b.html#y: there is no such place",
        "a.html: c.html: there is no such file",
        "a.html: #z: there is no such place",
        "a.html: d.png: there is no such file",
    ]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("# A\n\n[x](nowhere.md)\n", "nowhere.md"),
        ("# A\n\n[x](#key-train.nothing)\n", "key-train.nothing"),
        ("# A\n\n```{hpcddp} nothing\n```\n", "unknown part 'nothing'"),
    ],
)
def test_a_warning_of_the_build_is_an_error(tmp_path: Path, page: str, said: str) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    for name in ("conf.py", "_ext", "_static"):
        (source / name).symlink_to(DOCS / name)
    (source / "index.md").write_text(page)
    done = build(source, tmp_path / "site")
    assert done.returncode == 1 and said in done.stderr, done.stderr


@pytest.mark.parametrize(("option", "kind"), [((), "html"), (("--links",), "linkcheck")])
def test_the_script_calls_sphinx(tmp_path: Path, option: tuple[str, ...], kind: str) -> None:
    """With programs in place of its own that write down how they are called."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "docs"
    script.write_bytes((CHECKOUT / "scripts" / "docs").read_bytes())
    called = tmp_path / "called"
    for path in (tmp_path / "scripts" / "install", tmp_path / ".venv" / "bin" / "python"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "${{0##*/}} $*" >>{called}\n')
        path.chmod(0o755)
    script.chmod(0o755)
    subprocess.run([script, *option], check=True, env={"PATH": os.defpath})
    words = " ".join(["python", *WORDS, "docs", "docs/_build/html"]).replace("html", kind)
    assert called.read_text().splitlines() == ["install docs", words]
