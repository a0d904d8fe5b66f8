"""The parts of the sandbox that need no Slurm: its texts, its names, its processes."""

import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcddp.cli.sandbox import sandbox
from hpcddp.errors import SandboxError, UserError
from hpcddp.sandbox import cluster, config, daemons, hosts, own_processes, shell, state
from hpcddp.sandbox.cluster import Sandbox, Settings

SITE = config.SandboxSite(
    home="/tmp/box",
    host="vm",
    prefix="n",
    ports={"slurmctld": 12000, "slurmdbd": 12001, "slurmd": 12002},
    own_hostnames=True,
)


def nobody_lives(folder: Path) -> bool:
    return False


def everybody_lives(folder: Path) -> bool:
    return True


# --- texts


def test_extra_lines_take_the_place_of_the_defaults() -> None:
    text = config.files(SITE, Settings(extra={"killwait": "30", "JobRequeue": "0"}))["slurm.conf"]
    given = [line for line in text.splitlines() if line.lower().startswith(("killwait", "jobreq"))]
    assert given == ["killwait=30", "JobRequeue=0"]


def test_accounting_and_gpus_are_left_out_when_not_wanted() -> None:
    texts = config.files(SITE, Settings(accounting=False, gpus=0))
    assert set(texts) == {"slurm.conf", "daemons.conf"}
    assert "Accounting" not in texts["slurm.conf"]
    assert "gpu" not in texts["slurm.conf"].lower()


def test_no_configuration_line_is_an_empty_value() -> None:
    for text in config.files(SITE, Settings()).values():
        assert not [line for line in text.splitlines() if line.endswith("=")]


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"nodes": 251},
        {"gpus": -1},
        {"preempt_mode": "GANG"},
        {"extra": {"KillWait": "5\nSlurmUser=nobody"}},
        {"extra": {"Kill Wait": "5"}},
    ],
)
def test_settings_that_make_no_slurm_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["/tmp/a b", "/tmp/ä", "/tmp/a%n", "/tmp/a#b", "/" + "x" * 80])
def test_folders_in_which_slurm_cannot_live(folder: str) -> None:
    assert not config.fits(Path(folder))
    assert config.fits(Path("/root/.local/state/hpcddp/sandbox"))


# --- names in the hosts file


def test_lines_come_and_go_and_leave_the_rest_alone(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    before = "127.0.0.1 localhost\n# n1 is a comment\n10.0.0.1\tvm vm.example\n"
    file.write_text(before)
    folder = tmp_path / "a folder # with ü"
    assert hosts.claim(folder, 2, everybody_lives, file) == "n"
    names = [line.split()[1] for line in file.read_text().splitlines()[3:]]
    assert names == ["n1", "n2", "nctl"]
    hosts.release(folder, file)
    assert file.read_text() == before


def test_a_second_sandbox_gets_other_names_unless_the_first_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n")
    assert hosts.claim(tmp_path / "a", 4, everybody_lives, file) == "n"
    assert hosts.claim(tmp_path / "b", 4, everybody_lives, file) == "sb2n"
    assert hosts.owners(file.read_text()) == {tmp_path / "a", tmp_path / "b"}
    assert hosts.claim(tmp_path / "c", 4, nobody_lives, file) == "n"
    assert hosts.owners(file.read_text()) == {tmp_path / "c"}


def test_a_name_of_a_real_machine_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("10.0.0.7 n3.example n3")
    assert hosts.claim(tmp_path / "a", 4, everybody_lives, file) == "sb2n"
    assert file.read_text().startswith("10.0.0.7 n3.example n3\n")


def test_a_sandbox_that_starts_keeps_its_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has chosen them and does not listen yet."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n")
    monkeypatch.setattr(hosts, "HOSTS", file)
    other = tmp_path / "other"
    other.mkdir()
    hosts.claim(other, 4, everybody_lives, file)
    state.State(Settings(4), SITE).save(other)
    first, chosen = SITE.ports["slurmctld"], random.randrange
    near = iter([first - 5, first, first + 5])
    monkeypatch.setattr(random, "randrange", lambda *ends: next(near, None) or chosen(*ends))
    found = cluster.free_ports(6)
    assert next(near, None) is None  # all were tried
    assert not {*range(found, found + 6)} & {*range(first, first + 6)}


# --- processes


def test_a_process_is_ended_but_never_a_stranger_with_its_pid(tmp_path: Path) -> None:
    sleeper = own_processes.start(["sleep", "60"], os.environ, tmp_path / "out")
    later = own_processes.OwnProcess(sleeper.pid, sleeper.started + 1, sleeper.argv)
    other = own_processes.OwnProcess(sleeper.pid, sleeper.started, ("sleep", "61"))
    try:
        assert own_processes.end([later, other], signal.SIGKILL, 0.1) == []
        assert sleeper.alive()
    finally:
        assert own_processes.end([sleeper], signal.SIGKILL, 10) == []
    assert not sleeper.alive()


def test_a_program_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="/nowhere/slurmd did not start") as caught:
        own_processes.start(["/nowhere/slurmd"], os.environ, tmp_path / "out", hostname="n1")
    assert caught.value.hint  # the shell's words, or those of unshare where it is forbidden


def test_a_node_has_a_tmp_of_its_own_in_which_earlier_folders_are_shared(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as earlier:
        node = own_processes.start(["sleep", "60"], os.environ, tmp_path / "out", hostname="n1")
        root = Path(f"/proc/{node.pid}/root")
        try:
            Path(earlier, "told").touch()
            assert (root / earlier.lstrip("/") / "told").exists()
            with tempfile.TemporaryDirectory(dir="/tmp") as later:
                assert not (root / later.lstrip("/")).exists()
            assert not list((root / "dev/shm").iterdir())
            (root / "tmp/own").touch()
            assert not Path("/tmp/own").exists()
        finally:
            own_processes.end([node], signal.SIGKILL, 10)


def test_a_shell_that_points_at_a_sandbox_is_not_taken_for_its_job(tmp_path: Path) -> None:
    pointing = {**os.environ, "SLURM_CONF": f"{tmp_path}/slurm.conf"}
    node = {**os.environ, "SLURM_CONF": f"{tmp_path}/daemons.conf", "SLURMD_NODENAME": "n1"}
    shell = own_processes.start(["sleep", "60"], pointing, tmp_path / "out")
    task = own_processes.start(["sleep", "60"], node, tmp_path / "out")
    try:
        assert own_processes.of_jobs(str(tmp_path)) == [task]
    finally:
        own_processes.end([shell, task], signal.SIGKILL, 10)


def test_the_tasks_of_one_node_are_told_from_those_of_another(tmp_path: Path) -> None:
    """n1 is not n10: a node that is killed takes no other with it."""
    tasks = {}
    try:
        for name in ("n1", "n10"):
            node = {**os.environ, "SLURM_CONF": f"{tmp_path}/d.conf", "SLURMD_NODENAME": name}
            tasks[name] = own_processes.start(["sleep", "60"], node, tmp_path / "out")
        for name, task in tasks.items():
            assert own_processes.of_jobs(str(tmp_path), name) == [task]
        own_processes.send([tasks["n1"]], signal.SIGSTOP)
        assert all(task.alive() for task in tasks.values())
    finally:
        assert not own_processes.end(tasks.values(), signal.SIGKILL, 10)


# --- the record


def test_a_record_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    record = state.State(Settings(), SITE, {"munged": own_processes.OwnProcess(1, 2, ("munged",))})
    record.save(tmp_path)
    assert state.load(tmp_path) == record
    (tmp_path / state.NAME).chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IWOTH)
    with pytest.raises(SandboxError, match="another user can write it"):
        state.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"daemons": {"a": {}}}'])
def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / state.NAME).write_text(text)
    (tmp_path / state.NAME).chmod(0o600)
    with pytest.raises(SandboxError, match=state.NAME):
        state.load(tmp_path)


def test_a_folder_with_other_things_is_neither_used_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(SandboxError):
        Sandbox(tmp_path).up()
    assert not Sandbox(tmp_path).down()
    assert (tmp_path / "thesis.tex").read_text() == "dear"


# --- commands


def run(*words: str, folder: Path) -> str:
    """What `hpcddp sandbox` prints to stdout and stderr."""
    done = CliRunner().invoke(sandbox, [*words, "--folder", str(folder)])
    assert done.exit_code == 0, done.output
    return done.output


def test_down_without_up_says_so(tmp_path: Path) -> None:
    assert run("down", folder=tmp_path / "no") == f"no sandbox to end in {tmp_path / 'no'}\n"
    assert "sandbox up" in run("status", folder=tmp_path / "no")


def test_env_without_up_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="the sandbox is not up") as caught:
        Sandbox(tmp_path / "no").environ()
    assert caught.value.hint == f"start it with `hpcddp sandbox up --folder {tmp_path / 'no'}`"


def recorded(folder: Path, *, ready: bool = True) -> config.SandboxSite:
    """The record of a sandbox with one daemon, which is this Python."""
    site = replace(SITE, home=str(folder))
    folder.mkdir()
    (own,) = own_processes.of_pids([os.getppid()])
    state.State(Settings(nodes=1, gpus=1), site, {"munged": own}, ready).save(folder)
    return site


def test_a_shell_that_does_not_use_the_sandbox_is_reminded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    monkeypatch.setenv("HPCDDP_SANDBOX", str(folder))
    assert shell.reminder({}) == ""
    site = recorded(folder)
    line = f"""eval "$(hpcddp sandbox env --folder '{folder}')\""""
    assert shell.reminder({}) == f"a sandbox is up, but this shell does not use it: run {line}"
    assert shell.reminder({"SLURM_CONF": site.slurm_conf}) == ""
    monkeypatch.delenv("HPCDDP_SANDBOX")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert shell.command(shell.usual_folder(), "up") == "hpcddp sandbox up"
    assert shell.reminder({}) == ""


def test_down_says_what_to_unset_in_a_shell_that_uses_it(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    site = recorded(folder)
    environ = {"SLURM_CONF": site.slurm_conf, "HPCDDP_SANDBOX": str(folder)}
    line = "unset SLURM_CONF HPCDDP_SANDBOX"
    assert shell.leaving(environ, folder) == line
    assert shell.leaving({"SLURM_CONF": "/etc/slurm/slurm.conf"}, folder) == ""
    (folder / state.NAME).unlink()
    assert shell.leaving(environ, folder) == line  # a second `down`
    assert shell.leaving(environ, tmp_path / "other") == ""


def test_status_says_what_to_do_with_a_broken_one(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    recorded(folder, ready=False)
    text = run("status", folder=folder)
    assert text.startswith(f"broken  {folder}\n  n1  1 GPU  unknown\n")
    assert f"`hpcddp sandbox up --folder {folder}` starts it again" in text
    assert f"`hpcddp sandbox down --folder {folder}` removes it" in text


@pytest.mark.parametrize("installed", [True, False])
def test_an_ordinary_user_learns_all_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(daemons.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(daemons.shutil, "which", lambda name, path: name if installed else None)
    with pytest.raises(SandboxError, match="the sandbox needs root") as caught:
        daemons.require(accounting=True)
    assert ("apt-get install" in caught.value.hint) == (not installed)
    assert "--cluster local" in caught.value.hint


def test_status_of_none(tmp_path: Path) -> None:
    done = CliRunner().invoke(sandbox, ["status", "--json", "--folder", str(tmp_path / "no")])
    assert json.loads(done.output) == {"state": "down", "folder": str(tmp_path / "no")}
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "wrong", [["--nodes", "0"], ["--nodes", "two"], ["--set", "KillWait"], ["--preempt-mode", "X"]]
)
def test_wrong_flags_start_nothing(tmp_path: Path, wrong: list[str]) -> None:
    folder = tmp_path / "box"
    done = CliRunner().invoke(sandbox, ["up", "--folder", str(folder), *wrong])
    assert done.exit_code == 2
    assert wrong[0] in done.output
    assert not folder.exists()


def test_missing_programs_are_named_with_their_packages(tmp_path: Path) -> None:
    script = (
        "from hpcddp.sandbox import daemons\n"
        "from hpcddp.errors import SandboxError\n"
        "daemons.SEARCH = '/nowhere'\n"
        "try: daemons.require(accounting=True)\n"
        "except SandboxError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "munged" in done.stdout
    assert "apt-get install slurm-wlm" in done.stdout
