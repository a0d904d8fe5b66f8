"""A person who follows a page: block by block, in one folder, in one shell."""

import ast
import json
import os
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import jinja2
import pages
import recorded
from page_shell import Shell
from pages import Block, Step
from sites import FOREIGN, Site

from hpcddp.planning import clusters
from hpcddp.planning.jobfile import Layer

BIN = Path(sys.executable).parent
TOOLS = (
    "awk", "basename", "chmod", "cp", "cut", "date", "diff", "dirname", "find", "git", "id", "ln",
    "ls", "mkdir", "mktemp", "mv", "nproc", "readlink", "rm", "sed", "seq", "sh", "sort", "stat",
    "tail", "tar", "tee", "tr", "uname", "wc", "xargs",
)  # fmt: skip
# What makes a page cheap to follow where it does not say otherwise.
CHEAP = {
    "HPCDDP_MAX_STEPS": "4",
    "HPCDDP_LAUNCHER": "fork",
    "OMP_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
    "PYTHONWARNINGS": "ignore",
}
CTRL_C = (0, 130, -signal.SIGINT)  # exit codes of a command that got it


class Reader:
    """Follows pages.

    Args:
        folder: where the reader works; his home lies beside it.
        environ: of his shell, by the place where a block runs.
        patient: whether to follow long blocks too.
    """

    def __init__(
        self, folder: Path, environ: Mapping[str, Mapping[str, str]], *, patient: bool = False
    ) -> None:
        self.patient = patient
        self.home, self.places = folder.with_name(f"{folder.name}-home"), set(environ)
        self.shell = Shell(folder, self.home, environ)

    def follow(self, blocks: Iterable[Block]) -> None:
        """Do what the blocks say, where they run in a place that is known here."""
        try:
            self._follow(blocks)
        finally:
            if pages.HERE in self.places and (self.shell.cwd / "runs").is_dir():
                ended = "hpcddp ls --json | grep -q RUNNING && hpcddp cancel $(ls runs)"
                self.shell.run(ended, pages.HERE)

    def _follow(self, blocks: Iterable[Block]) -> None:
        pair: Block | None = None
        for block in blocks:
            assert not (problem := pages.wrong(block)), problem
            if block.language == "console":
                self._console(block, pair)
            else:
                self._part(block)
            if block.language in ("console", "diff"):
                pair = block if block.language == "diff" and block.path else None

    def _console(self, block: Block, pair: Block | None) -> None:
        """Run the commands of a block, with both texts of the diff before it if there is one."""
        if block.where not in self.places or ("long" in block.marks and not self.patient):
            return
        *others, last = block.steps()
        for mark in "-+" if pair else "+":
            if pair:
                self._write(pair.path, pair.side(mark))
            for step in others:
                self._step(block, step, last=False)
            self._step(block, last)

    def _part(self, block: Block) -> None:
        """A block that is no command: a file, a script, or a part of one."""
        if block.language == "diff":
            for mark in "-+":
                ast.parse(block.side(mark), str(block))
            if block.path:
                self._write(block.path, block.side("+"))
        elif block.path:
            self._write(block.path, block.text, more="add" in block.marks)
        elif block.language == "python":
            self._script(block)
        elif block.language == "toml":
            self._keys(block)
        elif block.language == "jinja":
            jinja2.Environment(autoescape=False).parse(block.text, str(block))
        elif block.language == "json":
            json.loads(block.text)

    def _script(self, block: Block) -> None:
        """Run a block of Python."""
        text = f"{block.marks.get('setup', '')}\n{block.text}"
        ast.parse(text, str(block))
        if "compile" in block.marks or block.where not in self.places:
            return
        path = self.home / f"block-{block.line}.py"
        path.write_text(text, encoding="utf-8")
        # Not `python PATH`: processes that it spawns would run it too.
        self._step(block, Step(f"""python -c 'exec(open("{path}").read())'"""))

    def _step(self, block: Block, step: Step, last: bool = True) -> None:
        """Run a command, and look at what it prints."""
        marks = block.marks if last else {}
        until, most = marks.get("until", ""), float(marks.get("for", "0").split()[0])
        # A rehearsal needs all steps of its job.
        whole = "long" in marks and step.command.startswith("hpcddp rehearse ")
        command = f"env -u HPCDDP_MAX_STEPS {step.command}" if whole else step.command
        shown, code = self.shell.run(command, block.where, until=until, most=most)
        said = f"{block}: $ {step.command}\n{shown}"
        codes = CTRL_C if until or most else (int(marks.get("exit", "0")),)
        assert code in codes, f"exit code {code}\n{said}"
        line = pages.missing(step.expected, shown) or (until if until not in shown else "")
        assert not line, f"not printed: {line!r}\n{said}"

    def _write(self, path: str, text: str, more: bool = False) -> None:
        place = self.home / path[2:] if path.startswith("~/") else self.shell.cwd / path
        place.parent.mkdir(parents=True, exist_ok=True)
        before = place.read_text(encoding="utf-8") + "\n\n" if more else ""
        place.write_text(before + text, encoding="utf-8")

    def _keys(self, block: Block) -> None:
        """Check a part of a job file or of a profile."""
        values = tomllib.loads(block.text)
        if block.marks.get("of") == "cluster":
            clusters.KEYS.load(values, str(block))
        else:
            Layer().put_all(values, str(block))


def places(site: Site) -> dict[str, dict[str, str]]:
    """The shells of a reader on a machine without Slurm, and on one where stand-ins answer."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    kept.pop("XDG_CONFIG_HOME", None)
    for tool in TOOLS:
        if (found := shutil.which(tool, path="/usr/bin:/bin")) and not (site.bin / tool).exists():
            (site.bin / tool).symlink_to(found)
    here = kept | CHEAP | {"PATH": f"{site.bin}:{BIN}"}
    answers = Site(site.folder.parent / "stand-ins")
    recorded.install(answers, "plain")
    with_slurm = here | {"PATH": f"{answers.bin}:{here['PATH']}"}
    del with_slurm["HPCDDP_LAUNCHER"]
    return {pages.HERE: here, pages.STAND_IN: with_slurm}
