"""Programs of a user's own in place of a task, on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import Command, until
from sites import Outcome, Site, record_run
from told import told

from hpcddp.attempt import ledger, rendezvous
from hpcddp.errors import JobFileError, UserError
from hpcddp.planning import jobfile
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir

# Tells what it finds, by rank, in the folder where it works.
TELL = """
import json, os, sys
found = {"arguments": sys.argv[1:], "environ": dict(os.environ), "folder": os.getcwd()}
open(f"told-{os.environ['RANK']}", "w").write(json.dumps(found))
"""
NASTY = ["a b", "$HOME", "*", "q'\"", "n\nl", "", "--", "`x`", "é", "\\"]


def submit(command: Command, *words: str, nodes: str = "2", gpus: str = "2") -> Outcome:
    size = ("--nodes", nodes, "--gpus", gpus)
    return command("submit", *size, "--no-snapshot", "--", *words)


def test_a_program_gets_its_words_and_its_rank(site: Site, command: Command) -> None:
    site.write("train.py", TELL)
    done = submit(command, sys.executable, "train.py", *NASTY)
    assert done.code == 0, done.err
    (run,) = site.runs.iterdir()
    assert run.name.startswith("train-")
    for rank in range(4):
        found = told(site, rank)
        assert (found["arguments"], found["folder"]) == (NASTY, str(site.folder))
        environ = found["environ"]
        assert isinstance(environ, dict)
        expected = {
            "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": rank // 2, "HPCDDP_ATTEMPT": 1, "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": run.name, "WANDB_RUN_ID": run.name, "HPCDDP_RUN_DIR": run,
        }  # fmt: skip
        assert {name: environ[name] for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
        assert environ["MASTER_PORT"].isdecimal()


# Each of two ranks waits until the other has spoken: the first to leave ends both.
LEAVE = """
import os, sys, time
name = "spoke-{HPCDDP_ATTEMPT}-{RANK}".format_map(os.environ)
print("here", flush=True)
open(name, "w").close()
while not os.path.exists(name[:-1] + str(1 - int(os.environ["RANK"]))):
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [3, 85])
def test_its_exit_code_is_its_own(site: Site, command: Command, code: int) -> None:
    """85 is what a rank leaves with that was asked to stop: not here."""
    site.write("train.py", LEAVE)
    done = submit(command, sys.executable, "train.py", str(code), nodes="1")
    assert done.code == 1 and "0: here\n" in done.err + done.out
    (path,) = site.runs.iterdir()
    attempts = ledger.attempts(RunDir(path))
    assert [(a.cause, a.exit_code) for a in attempts] == [("crash", code)] * 3


def test_status_tells_when_it_comes_back(site: Site, command: Command) -> None:
    site.write("train.py", "import time; time.sleep(60)")
    words = ("--", sys.executable, "train.py")
    command("submit", "--detach", "--set", "requeue.crashes=7", *words)
    until(command, lambda s: s["state"] == "RUNNING")
    policy = next(x for x in command("status").out.splitlines() if x.startswith("policy"))
    assert (
        "7 crashes" in policy
        and "3 time limits" in policy
        and policy.endswith(
            "later attempts run the same command, which must load its checkpoint (attach does)"
        )
    )
    command("cancel", "last")
    until(command, lambda s: s["state"] == "CANCELLED")
    assert "policy" not in command("status").out
    again = ("--set", "resume_command=x", "--set", "requeue.enabled=false", "--dry-run")
    assert command("submit", *again, *words).code == 2  # there is no program x


def test_after_a_preemption_it_begins_again_as_the_job_says(site: Site, command: Command) -> None:
    site.write("train.py", TELL + "import time\ntime.sleep(60 * ('--go' not in sys.argv))\n")
    again = f"{sys.executable} train.py --go"
    done = command("submit", "--no-snapshot", "--detach", "--set", f"resume_command={again}", "--",
                   sys.executable, "train.py")  # fmt: skip
    assert done.code == 0
    until(command, lambda s: (site.folder / "told-0").exists())
    command("preempt", "last")
    until(command, lambda s: s["state"] == "COMPLETED")
    assert told(site, 0)["arguments"] == ["--go"]
    (path,) = site.runs.iterdir()
    assert [a.cause for a in ledger.attempts(RunDir(path))] == ["preempted", "done"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["no-such-program"], "program 'no-such-program' not found"),
        ([], "no command after --"),
    ],
)
def test_what_cannot_be_found_is_told_before(
    site: Site, command: Command, words: list[str], what: str
) -> None:
    done = submit(command, *words)
    assert done.code == 2 and what in done.err and "Traceback" not in done.err
    assert not site.runs.exists()


def test_a_job_that_submits_another_leaves_it_nothing_of_its_own(
    site: Site, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = {"WANDB_RUN_ID": "outer", "TORCHELASTIC_RUN_ID": "outer", "HPCDDP_FORKED": "1"}
    outer |= {"HPCDDP_DASK": "x", "HPCDDP_DEADLINE": "9", "HPCDDP_SIGNAL": "USR1"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    site.write("train.py", TELL)
    assert submit(command, sys.executable, "train.py", nodes="1", gpus="1").code == 0
    (run,) = site.runs.iterdir()
    environ = told(site, 0)["environ"]
    assert isinstance(environ, dict) and environ["WANDB_RUN_ID"] == run.name
    assert not {"HPCDDP_FORKED", "HPCDDP_DASK", "HPCDDP_SIGNAL"} & environ.keys()
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert submit(command, sys.executable, "train.py", nodes="1", gpus="1").code == 0
    environ = told(site, 0)["environ"]
    assert isinstance(environ, dict) and environ["WANDB_RUN_ID"] == "mine"


def test_a_program_is_nothing_for_a_debugger(site: Site, command: Command) -> None:
    Path(site.folder, "jobs/mine.toml").write_text(f"command = [{sys.executable!r}]\n")
    done = command("run", "mine")
    assert done.code == 2 and "requires a task, and the job has a command" in done.err


def test_a_job_file_may_name_a_program(site: Site, command: Command) -> None:
    site.write("train.py", TELL)
    words = json.dumps([sys.executable, "train.py", "from the file"])
    Path(site.folder, "jobs/mine.toml").write_text(f"command = {words}\ngpus = 2\n")
    assert command("submit", "mine", "--no-snapshot").code == 0
    assert told(site, 1)["arguments"] == ["from the file"]
    assert (
        command("submit", "mine", "--no-snapshot", "--", sys.executable, "train.py", "mine").code
        == 0
    )
    assert told(site, 1)["arguments"] == ["mine"]


def test_a_job_has_a_task_or_a_program(site: Site) -> None:
    path = site.job("both", "command = ['true']\ntask = 'both.py'\n")
    with pytest.raises(JobFileError, match="a task and a command"):
        jobfile.file_layer(path)


FILE = "hpcddp.py"


def started(site: Site, command: Command, make: str) -> tuple[str, list[str | None]]:
    """Break a script after its submission; the job's output, and the attempts' causes."""
    site.write("train.py", "#!/bin/sh\nexit 0\n").chmod(0o755)
    site.write("jobs/mine.toml", 'command = ["./train.py"]\ngpus = 2\n[env]\nX = "1"\n')
    site.write("mine.sh.j2", "{% extends 'local.sh.j2' %}{% block setup %}{{ super() }}\n"
               f"{make}\n{{% endblock %}}")  # fmt: skip
    done = command("submit", "mine", "--no-snapshot", "--set", "template=mine.sh.j2")
    assert done.code == 1, done.text
    (path,) = site.runs.iterdir()
    return command("logs").out, [a.cause for a in ledger.attempts(RunDir(path))]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("/bin/chmod -x train.py",
         "cannot start ./train.py: Permission denied|chmod +x ./train.py`; or: -- python "),
        ("echo true >train.py", "./train.py: Exec format error|its first line must name"),
        ("echo '#!/no/such' >train.py", "No such file or directory|interpreter in its first line"),
        ("/bin/rm train.py", "No such file or directory|is the file there on every node?"),
    ],
)  # fmt: skip
def test_a_script_that_cannot_be_executed_is_a_user_error(
    site: Site, command: Command, make: str, words: str
) -> None:
    """./train.py without its x bit, and its like."""
    said, causes = started(site, command, make)
    assert all(word in said for word in words.split("|")), said
    assert causes == ["mistake"] and "Traceback" not in said


@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_a_file_hpcddp_py_of_a_users_own_breaks_no_job(
    site: Site, command: Command, launcher: str
) -> None:
    """torch calls hpcddp as it is imported, and would look for it in that file."""
    site.write(FILE, "raise RuntimeError('not the package')\n")
    site.write("train.py", "import torch\nprint('torch is here')\n")
    size = ("--gpus", "2", "--no-snapshot", "--launcher", launcher)
    done = command("submit", *size, "--", sys.executable, "train.py")
    assert done.code == 0 and done.text.count("torch is here") == 2, done.text
    assert done.text.count(f"{FILE} hides the package hpcddp") >= 1
    assert "Traceback" not in done.text


def test_python_m_hpcddp_runs_a_file_of_that_name(site: Site, command: Command) -> None:
    """Python's own rule; the command `hpcddp`, and python -P, do not look there."""
    site.write(FILE, "print('a file of my own')\n")
    for words, code in (([], "a file of my own\n"), (["-P"], "")):
        done = subprocess.run(
            [sys.executable, *words, "-m", "hpcddp", "ls"], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, code)
    assert command("ls").code == 0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "-u", "my train.py"], "my-train"),
        (["bash", "../x/run.sh", "a.py"], "run"),
        (["nvidia-smi"], "nvidia-smi"),
        (["/usr/bin/--"], "job"),
        (["bash", "-lc", "cd /some/where && python train.py"], "bash"),
        (["x" * 200], "x" * 40),
    ],
)
def test_a_run_is_named_after_its_program(words: list[str], name: str) -> None:
    assert jobfile.command_layer(words).values["name"] == name


def test_a_program_needs_no_batch(site: Site) -> None:
    flags = Layer()
    for key, value in (("command", [sys.executable, "-V"]), ("gpus", 5), ("nodes", "3")):
        flags.put(key, value, "flag")
    assert site.plan(flags, job=None).topology.world_size == 15
    with pytest.raises(UserError):
        flags.put("command", ["true", 1], "flag")


def test_a_script_that_never_meets_ends_with_the_reason(site: Site, command: Command) -> None:
    site.write("alone.py", "import signal; print('I am alone', flush=True); signal.pause()")
    limit = ("--set", "start_seconds=10")
    size = ("--nodes", "2", "--gpus", "1", "--no-snapshot")
    done = command("submit", *size, *limit, "--", sys.executable, "alone.py")
    assert done.code == 1
    told = command("why").out
    assert "no process group after 10 s" in told and "init_process_group" in told
    assert "steps lost: unknown" in told  # such a script does not say what it does
    assert json.loads(command("why", "--json").out)["steps_lost"] is None
    assert "mistake" in told and "I am alone" in command("logs").out


MEETS = """
import os, socket, time
if os.environ["RANK"] == "0":
    meeting = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
time.sleep(14)
"""


def test_one_that_has_met_is_left_alone(site: Site, command: Command) -> None:
    site.write("met.py", MEETS)
    limit = ("--set", "start_seconds=10")
    size = ("--nodes", "2", "--gpus", "1", "--no-snapshot")
    done = command("submit", *size, *limit, "--", sys.executable, "met.py")
    assert done.code == 0, done.text


def test_ranks_that_meet_elsewhere_are_left_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LIVES", 0.1)
    run = RunDir(site.runs / "program")
    run.path.mkdir(parents=True)
    words = ["python", "-m", "hpcddp.dask", "program.py"]
    record_run(run, launcher="dask", spec={"command": words, "start_seconds": 0.01})
    with subprocess.Popen(["sleep", "60"]) as ranks:
        rendezvous.watch(run, 1, ranks.pid, {"MASTER_PORT": "9"})
        assert ranks.poll() is None
        assert not run.attempt(1).met.exists()  # the run has no such attempt
        ranks.kill()
