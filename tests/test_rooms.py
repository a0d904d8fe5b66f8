"""The rooms of the house: who may import whom, and that each name in a string leads somewhere."""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcddp.launch.launchers import LAUNCHERS
from hpcddp.strategy import FACTORS, STRATEGIES

HOUSE = Path(__file__).parents[1]
CONTRIBUTING = (HOUSE / "CONTRIBUTING.md").read_text()
# Top first. A module may import from its own room and from those below.
ROOMS = (
    "doors", "cli", "dashboard", "report", "trackers", "sandbox", "doctor", "dask", "observe",
    "inside", "submit", "compare", "planning", "launch", "train", "data", "attempt", "slurm",
    "root",
)  # fmt: skip
TRAIN = ("train", "checkpoint", "parallel", "input", "monitor", "rank")
FRAMEWORKS = ("hpcddp.lightning", "hpcddp.transformers")  # their scripts import torch anyway
DOORS = {"hpcddp", "hpcddp.__main__", *FRAMEWORKS}
# For runs and programs of older versions.
OLD = {f"hpcddp.{name}" for name in ("spawn", "fork", "agent", "store", "sentry", "dask.places")}
OLD_FILES = {HOUSE / f"{name.replace('.', '/')}.py" for name in OLD}
# Who may import torch's half, inside a function, besides that half itself.
INTO_TRAIN = {
    *DOORS,
    "hpcddp.worker",
    "hpcddp.cli.weights",
    "hpcddp.sandbox.compare",
    "hpcddp.launch.imports",
    "hpcddp.doctor.check_rank",
}
STANDARD = {"root", "slurm", "attempt"}  # what a node runs without the environment
MOST = 20  # modules in a folder
OWN = {("hpcddp", "__version__"), ("hpcddp", "JOB_FORMAT")}  # the package's own facts
LOADERS = ("import_module", "__import__", "find_spec", "run_module")  # import by a name
OTHERS = {"train.py", "types.py", "hpcddp.py", "version.py"}  # files elsewhere
DOTTED = re.compile(r"(?<![\w./-])hpcddp(?:\.[a-zA-Z_]\w*)+(?![\w(]*/)")
# A name of JavaScript, a tag at MLflow, and a file of a user that hides the package.
ELSEWHERE = {"hpcddp.draw", "hpcddp.run", "hpcddp.py"}


class Arrow(NamedTuple):
    """One module that imports another."""

    source: str
    target: str
    inner: bool  # inside a function


def sources(house: Path = HOUSE) -> dict[str, ast.Module]:
    """Each module of the package, parsed."""
    made = {}
    for path in sorted((house / "hpcddp").rglob("*.py")):
        parts = path.relative_to(house).with_suffix("").parts
        made[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return {name: tree for name, tree in made.items() if name not in OLD}


def imports(name: str, tree: ast.Module, known: set[str]) -> Iterator[Arrow]:
    """What a module imports, but for types alone, and for the package's own facts."""
    unseen = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for part in test.body
        for node in ast.walk(part)
    }
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = (node for node in ast.walk(tree) if isinstance(node, kinds))
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        targets = () if id(node) in unseen else imported(node, known)
        for target in targets:
            assert not target.startswith("."), f"{name}: import by the whole name"
            if target != name:
                yield Arrow(name, target, id(node) in inner)


def imported(node: ast.AST, known: set[str]) -> Iterator[str]:
    """The modules that a statement imports, or a call by name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = "." * node.level + (node.module or "")
        for alias in node.names:
            if (package, alias.name) not in OWN:
                yield full if (full := f"{package}.{alias.name}") in known else package
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(LOADERS):
        names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        yield from (name for name in names if isinstance(name, str))


def arrows(trees: dict[str, ast.Module]) -> list[Arrow]:
    """Who imports whom in the package, and what else."""
    known = set(trees)
    return [arrow for name, tree in trees.items() for arrow in imports(name, tree, known)]


def room(name: str) -> str:
    """Where a module lives."""
    if name in DOORS or name.startswith(FRAMEWORKS):
        return "doors"
    if name == "hpcddp.worker":  # a door too, and named by the scripts and by what submits
        return "launch"
    first = name.split(".")[1]
    return first if first in ROOMS else "root"


def place(name: str) -> tuple[int, int]:
    """How far down a module is, and how far down inside of `train`."""
    parts = name.split(".")
    inner = parts[2] if len(parts) > 2 and parts[2] in TRAIN else "train"
    own = room(name)
    return ROOMS.index(own), TRAIN.index(inner) if own == "train" else 0


def wrong(trees: dict[str, ast.Module]) -> list[str]:
    """Each import that the order forbids, in words."""
    made = []
    for source, target, inner in arrows(trees):
        if target.partition(".")[0] != "hpcddp":
            continue
        if target in OLD:
            made.append(f"{source} imports {target}, which is for older versions alone")
        if place(target) < place(source):
            made.append(f"{source} imports {target}, which is above it")
        elif room(target) == "train" != room(source):
            if source not in INTO_TRAIN and not source.startswith(FRAMEWORKS):
                made.append(f"{source} imports {target}: torch's half has doors of its own")
            elif not inner and not source.startswith(FRAMEWORKS):
                made.append(f"{source} imports {target} outside of a function")
    return made


def circle(trees: dict[str, ast.Module]) -> list[str]:
    """Modules that import each other, around; none is good."""
    graph: dict[str, set[str]] = {}
    for source, target, _ in arrows(trees):
        graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return list(e.args[1])
    return []


def foreign(trees: dict[str, ast.Module]) -> list[str]:
    """Imports of a library where only the standard one may be."""
    own = {*sys.stdlib_module_names, "hpcddp"}
    return [
        f"{source} imports {target}"
        for source, target, _ in arrows(trees)
        if room(source) in STANDARD and target.partition(".")[0] not in own
    ]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return sources()


def test_imports_go_down(trees: dict[str, ast.Module]) -> None:
    assert wrong(trees) == []


def test_no_modules_import_each_other(trees: dict[str, ast.Module]) -> None:
    assert circle(trees) == []


def test_what_a_node_runs_needs_no_library(trees: dict[str, ast.Module]) -> None:
    assert foreign(trees) == []


def also(trees: dict[str, ast.Module], module: str, line: str) -> dict[str, ast.Module]:
    """The house, were this line in a module."""
    return {**trees, module: ast.parse(f"{ast.unparse(trees[module])}\n{line}")}


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        ("hpcddp.planning.plan", "import hpcddp.submit.status", "which is above it"),
        ("hpcddp.planning.plan", "from hpcddp.submit import status", "which is above it"),
        ("hpcddp.planning.plan", "def f():\n    import hpcddp.train.loop", "doors of its own"),
        ("hpcddp.sandbox.compare", "import hpcddp.train.loop", "outside of a function"),
        ("hpcddp.train.rank.world", "import hpcddp.train.loop", "which is above it"),
        ("hpcddp.errors", "import hpcddp.slurm.rules", "which is above it"),
        ("hpcddp.attempt.claim", "import hpcddp.data.names", "which is above it"),
        ("hpcddp.planning.plan", "import_module('hpcddp.submit.status')", "which is above it"),
        ("hpcddp.planning.plan", "__import__('hpcddp.train.loop')", "doors of its own"),
        (
            "hpcddp.planning.plan",
            "if not TYPE_CHECKING:\n    import hpcddp.cli",
            "which is above it",
        ),
        ("hpcddp.slurm.rules", "import hpcddp.spawn", "which is for older versions alone"),
    ],
)
def test_the_order_is_kept(trees: dict[str, ast.Module], module: str, line: str, said: str) -> None:
    (found,) = wrong(also(trees, module, line))
    assert found.startswith(f"{module} imports") and found.endswith(said)


def test_types_alone_may_come_from_above(trees: dict[str, ast.Module]) -> None:
    line = "if TYPE_CHECKING:\n    import hpcddp.submit.status"
    assert wrong(also(trees, "hpcddp.planning.plan", line)) == []


def test_a_circle_and_a_library_are_seen(trees: dict[str, ast.Module]) -> None:
    around = also(trees, "hpcddp.slurm.commands", "def f():\n    import hpcddp.slurm.rules")
    assert {*circle(around)} >= {"hpcddp.slurm.commands", "hpcddp.slurm.rules"}
    (found,) = foreign(also(trees, "hpcddp.slurm.rules", "def f():\n    import click"))
    assert found == "hpcddp.slurm.rules imports click"


def test_rooms_are_small_and_files_have_names_of_their_own(trees: dict[str, ast.Module]) -> None:
    package = HOUSE / "hpcddp"
    paths = {*package.rglob("*.py")} - OLD_FILES
    folders = Counter(path.parent.relative_to(package) for path in paths)
    assert {str(name): n for name, n in folders.items() if n > MOST} == {}
    own = [p for p in paths if p.parent.name != "cli" and not p.stem.startswith("__")]
    assert [name for name, n in Counter(path.name for path in own).items() if n > 1] == []
    uncounted = {str(path.relative_to(HOUSE)) for path in OLD_FILES}
    assert {name for name in uncounted if f"`{name}`" not in CONTRIBUTING} == set()


def test_each_room_says_what_it_is(trees: dict[str, ast.Module]) -> None:
    all_arrows = arrows(trees)
    rooms = {name for name in trees if (HOUSE / name.replace(".", "/")).is_dir()}
    for name in rooms - {"hpcddp"}:
        text = ast.get_docstring(trees[name]) or ""
        assert len(text.splitlines()) >= 3, name
        assert "It imports " in text, name
        package, _, folder = name.rpartition(".")
        above = ast.get_docstring(trees[package]) or ""
        assert package == "hpcddp" or f"`{folder}`" in above, name
        assert f"`{folder}/`" in CONTRIBUTING, name
        for module in re.findall(r"``(\w+)", text.partition("Others use")[2]):
            users = {arrow.source for arrow in all_arrows if arrow.target == f"{name}.{module}"}
            assert any(user.rpartition(".")[0] != name for user in users), (name, module)
        for module, users in rooms_that_use(name, all_arrows).items():
            assert len(users) < 2 or f"``{module}" in text, (name, module)


def rooms_that_use(name: str, all_arrows: Iterable[Arrow]) -> dict[str, set[str]]:
    """The modules of a room -> the rooms elsewhere that import them."""
    users = defaultdict(set)
    for source, target, _ in all_arrows:
        package, _, module = target.rpartition(".")
        if package == name and not f"{source}.".startswith(f"{name}."):
            users[module].add(source.rpartition(".")[0])
    return users


def files(*suffixes: str) -> list[Path]:
    """The checkout's own text files."""
    tops = ("hpcddp", "templates", "jobs", "tests", "benchmarks", "scripts", "docs")
    below = (path for top in tops for path in (HOUSE / top).rglob("*"))
    own = [*below, *HOUSE.glob("*.md"), HOUSE / "setup.cfg"]
    own = [path for path in own if "older_" not in str(path)]
    own = [path for path in own if path not in {*OLD_FILES, Path(__file__)}]
    return [path for path in own if path.is_file() and path.suffix in suffixes]


def defined(tree: ast.Module) -> set[str]:
    """The names of a module; of a package also those that it gives when they are asked for."""
    made = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.alias):
            made.add(node.asname or node.name)
    return made


def leads_nowhere(name: str, trees: dict[str, ast.Module]) -> bool:
    """Whether neither a module nor something in one has this dotted name."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        if tree := trees.get(".".join(parts[:i])):
            return i < len(parts) and parts[i] not in defined(tree) | {"__file__"}
    return True


def named(text: str) -> Iterator[str]:
    """Each of our dotted names in a text, those of imports too."""
    yield from DOTTED.findall(text)
    for package, names in re.findall(r"from (hpcddp[\w.]*) import ([a-zA-Z_][\w, ]*)", text):
        yield from (f"{package}.{name.split()[0]}" for name in names.split(",") if name.strip())


def test_names_in_strings_lead_somewhere(trees: dict[str, ast.Module]) -> None:
    """In templates, tables, setup.cfg, `-m` calls and documents."""
    known = trees | {f"hpcddp.{top}": ast.Module([], []) for top in ("jobs", "templates")}
    known |= {f"hpcddp.jobs.{p.stem}": ast.Module([], []) for p in (HOUSE / "jobs").glob("*.py")}
    lost = {
        name
        for path in files(".py", ".j2", ".toml", ".md", ".cfg", ".sbatch", "")
        for name in named(path.read_text())
        if leads_nowhere(name, known)
    }
    assert lost - ELSEWHERE == set()


def test_files_in_comments_are_there() -> None:
    """`claim.py` in a docstring or comment is a module of this project."""
    own = {path.name for path in files(".py")} | OTHERS
    lost = {
        f"{path.relative_to(HOUSE)}: {name}"
        for path in (*(HOUSE / "hpcddp").rglob("*.py"), HOUSE / "CONTRIBUTING.md")
        for name in re.findall(r"(?<![\w./{}*-])[a-z_]+\.py\b(?!\()", path.read_text())
        if name not in own
    }
    assert lost == set()


def asking(trees: dict[str, ast.Module], table: str, names: Collection[str]) -> set[str]:
    """Modules beside a table's own that compare something with a name of its rows."""
    return {
        name
        for name, tree in trees.items()
        if name != table
        for node in ast.walk(tree)
        if compares(node)
        for side in ast.walk(node)
        if isinstance(side, ast.Constant) and side.value in names
    }


def compares(node: ast.AST) -> bool:
    """Whether a part of a program does something else for another value."""
    if isinstance(node, ast.Subscript):  # {"fork": 1}[launcher]
        return isinstance(node.value, ast.Dict)
    tests = ("startswith", "endswith", "get")
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return isinstance(node, ast.Compare | ast.MatchValue) or (call and node.func.attr in tests)


def asking_templates(templates: Iterable[str]) -> list[str]:
    """Uses of the launcher's name in templates, but to include its own."""
    allowed = re.compile(r"\{% include launcher %\}")
    code = re.compile(r"\{[{%](.*?)[%}]\}", re.S)
    return [part for text in templates for part in code.findall(allowed.sub("", text))
            if re.search(r"(?<![.\w])launcher\b", part)]  # fmt: skip


def test_what_differs_between_launchers_is_in_their_table(trees: dict[str, ast.Module]) -> None:
    """No other module asks for one by its name."""
    templates = (path.read_text() for path in (HOUSE / "templates").rglob("*.j2"))
    assert asking(trees, "hpcddp.launch.launchers", LAUNCHERS) == set()
    assert asking_templates(templates) == []


@pytest.mark.parametrize(
    "line",
    ["x == 'mpi'", "x in ('mpi', 'fork')", "x.startswith('mpi')", "{'mpi': 1}[x]", "{}.get('mpi')",
     "match x:\n    case 'mpi':\n        pass"],
)  # fmt: skip
def test_who_asks_for_a_launcher_is_seen(trees: dict[str, ast.Module], line: str) -> None:
    named = asking(also(trees, "hpcddp.submit.prepare", line), "hpcddp.launch.launchers", LAUNCHERS)
    assert named == {"hpcddp.submit.prepare"}
    assert asking_templates(["{% if 'mpi' in launcher %}", "{{ x }}"]) == [" if 'mpi' in launcher "]


def test_what_differs_between_strategies_is_in_their_table(trees: dict[str, ast.Module]) -> None:
    """No other module asks for one by its name. Dimensions of the mesh have the same names."""
    assert asking(trees, "hpcddp.strategy", STRATEGIES.keys() - set(FACTORS)) == set()
    names = "|".join(STRATEGIES)
    asked = re.compile(rf"\bstrategy\b\)? *(==|!=|in\b)[^\n]*[\"']({names})[\"']")
    modules = (HOUSE / "hpcddp").rglob("*.py")
    assert [path.name for path in modules if asked.search(path.read_text())] == []
