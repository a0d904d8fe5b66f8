"""How long a module and its parts may be, and what a result is called."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
MODULES = sorted((HOUSE / "hpcddp").rglob("*.py"))
LINES = 300  # of a module
FUNCTION = 40  # lines of a function, from its def on
RULE = 20  # lines of most functions
METHODS = 10  # public ones of a class
PUBLIC = {"hpcddp/train/loop.py: Run"}  # users' own loops call its methods
CALLBACKS = {"Preemptible"}  # one for each framework
RIDDLES = {"found", "told"}  # say nothing of what they hold
DEF = (ast.FunctionDef, ast.AsyncFunctionDef)


def over(name: str, source: str) -> Iterator[str]:
    """What of a module is too long."""
    if (count := len(source.splitlines())) > LINES:
        yield f"{name}: {count} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEF) and (count := node.end_lineno - node.lineno + 1) > FUNCTION:
            yield f"{name}:{node.lineno}: {node.name} has {count} lines"
        if isinstance(node, ast.ClassDef) and f"{name}: {node.name}" not in PUBLIC:
            count = sum(public(method) for method in node.body)
            if count > METHODS:
                yield f"{name}:{node.lineno}: {node.name} has {count} public methods"


def public(node: ast.stmt) -> bool:
    """Whether it is a method for others; a property reads like a field."""
    if not isinstance(node, DEF) or node.name.startswith("_"):
        return False
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    return not any(mark in ("property", "cached_property", "functools.cached_property") or
                   mark.endswith(".setter") for mark in marks)  # fmt: skip


def riddles(name: str, source: str) -> Iterator[str]:
    """Where something is called by a word that says nothing of it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            word = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            word = node.attr
        elif isinstance(node, ast.arg):
            word = node.arg
        elif isinstance(node, (*DEF, ast.ClassDef)):
            word = node.name
        else:
            continue
        if word.strip("_").lower() in RIDDLES:
            yield f"{name}:{node.lineno}: {word}"


@pytest.mark.parametrize("look", [over, riddles])
def test_the_house_keeps_its_limits(look) -> None:
    wrong = [x for path in MODULES for x in look(str(path.relative_to(HOUSE)), path.read_text())]
    assert wrong == []


LONG = "def f():\n" + "    pass\n" * FUNCTION
MANY = "class C:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(METHODS + 1))
PROPERTY = MANY.replace("    def m0", "    @property\n    def m0").replace("def m1(", "def _m1(")


@pytest.mark.parametrize(
    ("look", "source", "said"),
    [
        (over, "\n" * (LINES + 1), ["m: 301 lines"]),
        (over, LONG, ["m:1: f has 41 lines"]),
        (over, MANY, ["m:1: C has 11 public methods"]),
        (over, PROPERTY, []),
        (riddles, "found = 1", ["m:1: found"]),
        (riddles, "for told in x: pass", ["m:1: told"]),
        (riddles, "def f(found): return x.found", ["m:1: found"]),
        (riddles, "def _told(): self.found()", ["m:1: _told"]),
        (riddles, "self._found = 1", ["m:1: _found"]),
    ],
)
def test_what_is_over_a_limit_is_seen(look, source: str, said: list[str]) -> None:
    assert list(look("m", source)) == said


def test_a_class_has_a_name_of_its_own() -> None:
    """Private ones too: a word has one meaning."""
    places = defaultdict(set)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in CALLBACKS:
                places[node.name.lstrip("_")].add(str(path.relative_to(HOUSE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_function_has_20_lines_as_a_rule() -> None:
    lengths = [
        node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DEF) and node.end_lineno
    ]
    assert sum(length > RULE for length in lengths) < 0.1 * len(lengths)
