"""What the wheel brings beside the package: man pages, completions, an environment module."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sites import CHECKOUT, COMMAND, Outcome, Site

from hpcddp import __version__, cli

sys.path.insert(0, str(CHECKOUT / "docs" / "_ext"))

import man_pages
import shared_files

PAGES = sorted((shared_files.FOLDER / "man" / "man1").iterdir())
BASH = shared_files.FOLDER / shared_files.COMPLETIONS["bash"]
MODULE = f"share/modulefiles/hpcddp/{__version__}"
# All that our pages say to roff.
REQUEST = re.compile(r"\.(TH|SH|PP|TP|nf|fi|nh|ad)( .*)?$")
ESCAPE = re.compile(r"\\(?:\((?:rs|aq|ga|ha|ti)|\[u[0-9A-F]{4,5}\]|f[BP]|-|&)")


def test_the_files_are_those_of_the_command_line_as_it_is() -> None:
    """If not, run scripts/share."""
    there = {
        str(path.relative_to(shared_files.FOLDER)): path.read_text()
        for path in shared_files.FOLDER.rglob("*")
        if path.is_file()
    }
    program = "import json, shared_files; print(json.dumps(shared_files.files()))"
    folder = str(Path(shared_files.__file__).parent)
    # In a process of its own: click keeps the --help option that the first call of a command made.
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": folder},
    )  # fmt: skip
    assert there == json.loads(done.stdout)


def test_each_command_has_a_page() -> None:
    names = {page.name for page in PAGES}
    assert {f"hpcddp-{name}.1" for name in cli.COMMANDS} <= names
    assert {"hpcddp.1", "hpcddp-sandbox-up.1"} <= names


def faults(page: str) -> list[str]:
    """Lines of a man page that roff would not understand, or would read as something else."""
    lines = page.splitlines()
    wrong = [line for line in lines if line[:1] in (".", "'") and not REQUEST.match(line)]
    wrong += [line for line in lines if not line.strip()]
    wrong += [line for line in lines if "\\" in ESCAPE.sub("", line)]
    wrong += [line for line in lines if line.count("\\fB") != line.count("\\fP")]
    filled = [line for line in lines if line in (".nf", ".fi")]
    return wrong + ([] if filled == [".nf", ".fi"] * (len(filled) // 2) else filled)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_well_formed(page: Path) -> None:
    text = page.read_text()
    assert text.isascii()
    assert faults(text) == []
    sections = re.findall(r"^\.SH (.+)$", text, re.MULTILINE)
    assert sections[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    assert re.search(rf"^\.SH NAME\n{re.escape(man_pages.escaped(page.stem))} \\- \S", text, re.M)


@pytest.mark.parametrize(
    "line", [".Sh NAME", "'quoted", "", "a \\ b", "C:\\new", "\\fBbold", ".nf", ".fi\n.nf"]
)
def test_a_page_that_is_not_is_seen(line: str) -> None:
    assert faults(f".TH X 1\n.SH NAME\nx \\- y\n{line}\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (".env is read", "\\&.env is read"),
        ("it's a\\b", "it\\(aqs a\\(rsb"),
        ("run `x -n`, then y", "run \\fBx \\-n\\fP, then y"),
        ("a ` alone", "a \\(ga alone"),
        ("größe", "gr\\[u00F6]\\[u00DF]e"),
    ],
)
def test_what_roff_would_read_is_escaped(text: str, line: str) -> None:
    (made,) = man_pages._paragraphs(text)
    assert made == line
    assert faults(made) == []


def shown(*pages: Path) -> str:
    """What man shows, in ASCII; it must have nothing to say about the pages."""
    if not shutil.which("man", path="/usr/bin:/bin"):
        pytest.skip("no man")
    done = subprocess.run(
        ["man", "--warnings", "-E", "ascii", "-l", *pages], capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "MANWIDTH": "100", "PAGER": "cat", "LC_ALL": "C"},
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return re.sub(r".\x08", "", done.stdout)


def test_man_shows_each_page_without_a_warning() -> None:
    text = shown(*PAGES)
    assert all(f"{page.stem.upper()}(1)" in text for page in PAGES)


def test_man_shows_what_help_says(command: Callable[..., Outcome]) -> None:
    text = " ".join(shown(shared_files.FOLDER / "man" / "man1" / "hpcddp-submit.1").split())
    help_text = command("submit", "--help").out
    options = re.findall(r"^  (-.*?)(?:  |$)", help_text, re.MULTILINE)
    assert len(options) > 15
    assert [option for option in options if option not in text] == []
    assert "hpcddp submit mine --nodes 2 --gpus 4 --set train.lr=3e-4" in text


def test_the_shipped_completion_completes_in_bash(site: Site) -> None:
    (site.bin / "hpcddp").symlink_to(COMMAND)
    words = "COMP_LINE='hpcddp sub' COMP_POINT=10 COMP_WORDS=(hpcddp sub) COMP_CWORD=1"
    script = f'. "$1"; complete -p hpcddp; {words}; _hpcddp_completion hpcddp; echo $COMPREPLY'
    done = subprocess.run(
        ["bash", "-c", script, "bash", BASH], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "submit"
    assert "_hpcddp_completion hpcddp" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shipped_completion_is_a_program_of_its_shell(shell: str) -> None:
    if not (program := shutil.which(shell)):
        pytest.skip(f"no {shell}")
    subprocess.run(
        [program, "-n", shared_files.FOLDER / shared_files.COMPLETIONS[shell]], check=True
    )


# The commands of a module file, as Lmod gives them to one: an interpreter inside another. It prints
# what would be done.
TCL = """
set inner [interp create]
foreach name {prepend-path append-path conflict module-whatis} {
    proc $name args [string map [list NAME $name] {puts "NAME [join $args { }]"}]
    interp alias $inner $name {} $name
}
interp eval $inner [list set ModulesCurrentModulefile [lindex $argv 0]]
if {[catch {interp eval $inner {source $ModulesCurrentModulefile}} wrong]} {puts "error $wrong"}
interp eval $inner ModulesHelp
"""


class Installed:
    """An environment with a command and the module file, in a folder with a blank in its name."""

    def __init__(self, folder: Path) -> None:
        self.prefix = folder / "an env"
        self.file = self.prefix / MODULE
        self.file.parent.mkdir(parents=True)
        shutil.copy(CHECKOUT / MODULE, self.file)
        (self.prefix / "bin").mkdir()
        (self.prefix / "bin" / "hpcddp").symlink_to(COMMAND)
        self.program = folder / "module.tcl"
        self.program.write_text(TCL)

    def load(self, file: Path, **environ: str) -> list[str]:
        """What loading a module file does."""
        done = subprocess.run(
            ["tclsh", self.program, file], capture_output=True, text=True, check=True,
            env={"PATH": "/usr/bin:/bin", **environ}, cwd=self.prefix,
        )  # fmt: skip
        assert f"hpcddp {__version__}" in done.stderr  # its help
        return done.stdout.splitlines()


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    if not shutil.which("tclsh"):
        pytest.skip("no tclsh")
    return Installed(tmp_path.resolve())


def test_the_module_finds_its_environment(installed: Installed) -> None:
    link = installed.prefix.with_name("modules") / "hpcddp" / "new"
    link.parent.mkdir(parents=True)
    link.symlink_to(installed.file)
    done = installed.load(installed.file)
    assert f"prepend-path PATH {installed.prefix}/bin" in done
    assert f"prepend-path XDG_DATA_DIRS {installed.prefix}/share" in done
    assert "append-path XDG_DATA_DIRS /usr/share" in done  # else unset is not "none"
    assert "conflict hpcddp" in done
    assert not [line for line in done if "MANPATH" in line]  # man looks beside PATH
    assert installed.load(link) == done


def test_the_module_keeps_what_others_have_set(installed: Installed) -> None:
    done = installed.load(installed.file, MANPATH="/opt/man", XDG_DATA_DIRS="/opt/share")
    assert f"prepend-path MANPATH {installed.prefix}/share/man" in done
    assert not [line for line in done if line.startswith("append-path")]


def test_a_copy_of_the_module_file_says_what_is_wrong(installed: Installed) -> None:
    copy = shutil.copy(installed.file, installed.prefix.with_name("copy"))
    (last,) = [line for line in installed.load(Path(copy)) if line.startswith("error")]
    assert "make a link to the installed file" in last
