"""How the blocks of a page are marked and followed."""

from pathlib import Path

import page_reader
import pages
import pytest
from page_reader import Reader
from pages import HERE, NOT_RUN, SANDBOX, STAND_IN, Block
from sites import Site


def fence(language: str, *lines: str, marks: str = "") -> str:
    return "\n".join([marks, f"```{language}", *lines, "```", ""]).lstrip("\n")


def one(text: str) -> Block:
    (block,) = pages.parse(text, "page.md")
    return block


def reader(site: Site) -> Reader:
    return Reader(site.folder.with_name("page"), page_reader.places(site))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (fence("console", "$ ls"), HERE),
        (fence("console", "# ls"), SANDBOX),
        (fence("console", "$ hpcddp rehearse toy"), SANDBOX),
        (fence("console", "$ ls", marks="<!-- slurm: stand-in -->"), STAND_IN),
        (fence("console", "$ ls", marks="<!-- not run: needs a bucket -->"), NOT_RUN),
        ("<!-- page: sandbox -->\n\nText.\n\n" + fence("console", "$ ls"), SANDBOX),
    ],
)
def test_a_block_knows_where_it_runs(text: str, where: str) -> None:
    assert one(text).where == where


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (fence("python", "# train.py", "x = 1"), "train.py"),
        (fence("toml", "# jobs/mine.toml"), "jobs/mine.toml"),
        (fence("toml", "# ~/.config/x.toml"), "~/.config/x.toml"),
        (fence("jinja", "{# child.sh.j2 #}"), "child.sh.j2"),
        (fence("diff", "--- a.py", "+++ a.py", " x = 1"), "a.py"),
        (fence("python", "x = 1", marks="<!-- file: b.py -->"), "b.py"),
        (fence("python", "# words of a person"), ""),
    ],
)
def test_a_block_knows_the_file_that_it_is(text: str, path: str) -> None:
    assert one(text).path == path


def test_marks_may_hold_lines_and_stand_together() -> None:
    text = fence("python", "x", marks="<!-- setup:\nx = 1\ny = 2\n-->\n<!-- compile: why -->")
    assert one(text).marks == {"setup": "x = 1\ny = 2", "compile": "why"}


def test_a_block_in_a_list_loses_its_indent() -> None:
    assert one("- a\n\n  ```python\n  if x:\n      y\n  ```\n").text == "if x:\n    y\n"


def test_commands_go_on_and_have_their_output() -> None:
    block = one(fence("console", "$ a \\", "    b", "out", "...", "# cat <<E", "> x", "> E", "x"))
    steps = [(step.command, step.expected) for step in block.steps()]
    assert steps == [("a \\\n    b", ["out", "..."]), ("cat <<E\nx\nE", ["x"])]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (fence("console", "$ ls"), ""),
        (fence("bash", "ls"), "language 'bash'"),
        (fence("", "ls"), "language ''"),
        (fence("console", "$ ls", marks="<!-- slrum: stand-in -->"), "unknown mark 'slrum'"),
        (fence("console", "$ ls", marks="<!-- slurm: mine -->"), "no place 'mine'"),
        (fence("console", "$ ls", marks="<!-- not run: -->"), "the reason is missing"),
    ],
)
def test_a_block_that_cannot_be_followed_is_named(text: str, problem: str) -> None:
    said = pages.wrong(one(text))
    assert problem in said and bool(problem) == bool(said)


@pytest.mark.parametrize(
    ("line", "output", "there"),
    [
        ("run     pets-20261121-0253-a1b2", "run   x\nrun  pets-20261124-0900-00ff", True),
        ("accuracy 0.9833 (354 of 360 samples)", "accuracy 0.25 (9 of 360 samples)", True),
        ("folder  /home/ann/runs/a", "folder  /tmp/x/runs/a", True),
        ("folder  /home/ann/runs/a", "folder  /tmp/x/runs/b", False),
        ("0     0     n1    cpu", "0 0 host.example cpu", True),
        ("the ... is COMPLETED", "the run is COMPLETED", True),
        ("state  COMPLETED", "state  FAILED", False),
        ("lr = 1e-3", "lr = 0.001", True),
        ("a.b", "axb", False),
    ],
)
def test_expected_output_matches_but_for_what_varies(line: str, output: str, there: bool) -> None:
    assert (pages.missing([line], output) == "") == there


def test_expected_lines_come_in_their_order() -> None:
    assert pages.missing(["a", "...", "c"], "a\nb\nc") == ""
    assert pages.missing(["c", "a"], "a\nb\nc") == "a"


def test_a_page_is_one_folder_and_one_shell(site: Site) -> None:
    text = [
        fence("python", "# deep/a.py", "print('hello')"),
        fence("python", "print('again')", marks="<!-- add: deep/a.py -->"),
        fence("toml", "# ~/.config/b.toml", "x = 1"),
        fence("console", "$ export X=3; cd deep", "$ python a.py", "hello", "again"),
        fence("console", "$ echo $X; grep -c x ~/.config/b.toml; false", "3", "1",
              marks="<!-- exit: 1 -->"),
        fence("console", "# false"),
        fence("console", "$ squeue; sbatch x", "Submitted batch job 1",
              marks="<!-- slurm: stand-in -->"),
    ]  # fmt: skip
    reader(site).follow(pages.parse("\n".join(text), "page.md"))


def test_what_follows_a_diff_runs_with_both_texts(site: Site) -> None:
    text = fence("diff", "--- a.py", "+++ a.py", " x = 0", "-print('old')", "+print('new')")
    text += "\n" + fence("console", "$ python a.py | tee -a seen", "...")
    made = reader(site)
    made.follow(pages.parse(text, "page.md"))
    assert (made.shell.cwd / "seen").read_text() == "old\nnew\n"


def test_a_command_that_runs_on_is_interrupted(site: Site) -> None:
    text = fence("console", "$ echo begun; sleep 100", "begun", "^C", marks="<!-- until: begun -->")
    reader(site).follow(pages.parse(text, "page.md"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (fence("console", "$ true", "$ false"), "exit code 1"),
        (fence("console", "$ false", "$ true"), "exit code 1"),
        (fence("console", "$ echo a", "b"), "not printed: 'b'"),
        (fence("python", "1 / 0"), "ZeroDivisionError"),
        (fence("bash", "ls"), "language"),
    ],
)
def test_what_a_page_says_in_vain_is_seen(site: Site, text: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        reader(site).follow(pages.parse(text, "page.md"))


@pytest.mark.parametrize(
    "text",
    [
        fence("toml", "global_btach = 3"),
        fence("toml", "gpus_per_node = 'x'", marks="<!-- of: cluster -->"),
        fence("jinja", "{% block x %}"),
        fence("json", "{"),
        fence("diff", "-x = (", "+x = 1"),
        fence("python", "x = (", marks="<!-- compile: why -->"),
    ],
)
def test_a_part_that_is_wrong_is_seen(site: Site, text: str) -> None:
    with pytest.raises(Exception, match=r"."):
        reader(site).follow(pages.parse(text, "page.md"))


def test_each_page_is_looked_at() -> None:
    names = {pages.name(page) for page in pages.pages()}
    assert {"README.md", "docs/index.md", "docs/tutorial.md"} < names
    assert all(Path(name).suffix == ".md" for name in names)
