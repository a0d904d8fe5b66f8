"""`hpcddp stacks` and `hpcddp shell` on runs of this machine, and on a Slurm of the test."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_runs import end_all, until
from sites import COMMAND, Outcome, Site, record_run

from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.inside.all_stacks import grouped
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.stacks.stack_reader import RankStack

Command = Callable[..., Outcome]
HANG = """
import sys, time
import torch, torch.distributed as dist

def read_data():
    print("sleeps", flush=True)
    time.sleep(600)

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    read_data()
dist.all_reduce(torch.ones(2))
"""


@pytest.fixture
def running(site: Site) -> RunDir:
    """A run whose job Slurm says is running, on two nodes with two ranks each."""
    run = RunDir(site.runs / "toy-1")
    run.create()
    record_run(run, (2, 2), gpus=2)
    write_json(run.submission, {"job_id": "7", "submitted": 10.0})
    facts = Attempt(0, "7", "n1", 1, "1", True, "n[1-2]", time.time(), said_id="7")
    ledger.begin(run, facts, lambda earlier: False)
    row = f"echo '7|RUNNING|None|2029-12-31T23:00:00|2029-12-31T23:00:00|n[1-2]|{run.script}|toy-1'"
    site.slurm(squeue=row)
    return run


def test_a_hang_on_this_machine_is_two_stacks(site: Site, command: Command) -> None:
    site.write("hang.py", HANG)
    python = str(COMMAND.with_name("python"))
    size = ("--nodes", "1", "--gpus", "3", "--detach")
    assert command("submit", *size, "--", python, "hang.py").code == 0
    try:
        until(command, lambda s: "sleeps" in command("logs", "last").out)
        groups: list[dict[str, object]] = []
        for _ in range(60):  # until the others are in the collective
            done = command("stacks", "last", "--json")
            assert done.code == 0, done.text
            groups = json.loads(done.out)["groups"]
            if len(groups) == 2:
                break
        assert [group["ranks"] for group in groups] == [[0, 2], [1]]
        text = command("stacks").out
        assert "ranks 0,2 on " in text and "in all_reduce" in text
        assert "hang.py:7 in read_data" in text.partition("rank 1 on ")[2]
        shell(command)
    finally:
        end_all(site)


def shell(command: Command) -> None:
    """A shell beside rank 2, with commands on its standard input."""
    words = 'echo "rank $RANK of $WORLD_SIZE in $PWD"; exit 7\n'
    done = subprocess.run(
        [COMMAND, "shell", "last", "--rank", "2"], input=words, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 7 and done.stdout.startswith("rank 2 of 3 in "), done.stderr
    assert done.stdout.strip().endswith("/work")  # the code snapshot
    refused = command("shell", "last", "--rank", "3")
    assert (
        refused.code == 2 and "no rank 3\n  the attempt has 3 ranks, the first is 0" in refused.err
    )


def test_a_shell_enters_the_container_of_its_rank(site: Site, command: Command) -> None:
    """By a stand-in for Charliecloud: it says by a variable that a program is inside."""
    site.program("ch-run", 'while [ "$1" != -- ]; do shift; done; shift; INSIDE=yes exec "$@"')
    (site.folder / "image").mkdir()
    sets = ("software.container.image=image", "software.container.runtime=charliecloud",
            f"software.container.python={sys.executable}")  # fmt: skip
    site.write("wait.py", "import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    options = [word for value in sets for word in ("--set", value)]
    words = ("--cluster", "local", "--gpus", "1", *options, "--detach", "--", "python", "wait.py")
    assert command("submit", *words).code == 0
    try:
        until(command, lambda s: s["state"] == "RUNNING" and "up" in command("logs").out)
        done = subprocess.run(
            [COMMAND, "shell", "last"], input='echo "rank $RANK, $INSIDE"; exit 7\n', text=True,
            capture_output=True, timeout=240, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (7, "rank 0, yes\n"), done.stderr
    finally:
        end_all(site)


@pytest.mark.parametrize("words", [("stacks",), ("shell", "toy-1")])
@pytest.mark.parametrize(
    ("row", "state", "hint"),
    [
        ("echo '7|PENDING|Priority|N/A|N/A||x|toy-1'", "no rank runs: the run is PENDING",
         "`hpcddp status toy-1` says why it waits"),
        ("echo '7|RUNNING|None|N/A|N/A|n[1-2]|x|toy-1'", "the run is still starting",
         "try again when its attempt has started"),
    ],
)  # fmt: skip
def test_a_run_without_ranks_is_one_error(
    site: Site, hpcddp: Command, words: tuple[str, ...], row: str, state: str, hint: str
) -> None:
    run = RunDir(site.runs / "toy-1")
    run.create()
    record_run(run, (2, 2))
    write_json(run.submission, {"job_id": "7", "submitted": 10.0})
    site.slurm(squeue=row)
    done = hpcddp(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: toy-1: {state}\n  {hint}\n"


def test_an_ended_run_says_how_to_go_on(site: Site, hpcddp: Command, running: RunDir) -> None:
    ledger.end(running, 1, 0, "done")
    site.slurm()
    done = hpcddp("stacks")
    assert done.code == 2 and "no rank runs: the run is COMPLETED" in done.err
    assert "`hpcddp why toy-1` says how it ended" in done.err


SRUN = """\
echo "$*" >srun-words
echo '{"rank": 0, "host": "n1", "pid": 11, "frames": [], "state": "", "reason": ""}'
echo '{"rank": 1, "host": "n1", "pid": 12, "frames": [], "state": "", "reason": ""}'
echo '{"rank": 0, "frame": ["t.py", 3, "step"]}'
echo '{"rank": 1, "frame": ["t.py", 3, "step"]}'
echo 'srun: error: Task launch for StepId=7.3 failed on node n2: Communication timed out' >&2
exit 1
"""


def test_nodes_that_do_not_answer_are_named(site: Site, hpcddp: Command, running: RunDir) -> None:
    site.slurm(srun=SRUN, squeue=(site.bin / "squeue").read_text().partition("\n")[2])
    done = hpcddp("stacks", "--json")
    assert done.code == 4, done.text
    facts = json.loads(done.out)
    assert [(g["ranks"], g["hosts"]) for g in facts["groups"]] == [([0, 1], ["n1"])]
    assert [(row["rank"], row["host"]) for row in facts["away"]] == [(2, "n2"), (3, "n2")]
    assert facts["away"][0]["reason"] == "its node does not answer"
    words = Path(site.folder, "srun-words").read_text()
    assert words.startswith("--jobid=7 --overlap --nodelist=n[1-2] --nodes=2 --ntasks=2 ")
    assert words.endswith(f"{running.host} stacks {running.path} 1\n")
    text = hpcddp("stacks").out
    assert "ranks 0-1 on n1:\n  t.py:3 in step" in text
    assert "srun: Task launch for StepId=7.3 failed on node n2" in text


def test_no_answer_at_all_is_exit_code_3(site: Site, hpcddp: Command, running: RunDir) -> None:
    queue = (site.bin / "squeue").read_text().partition("\n")[2]
    site.slurm(squeue=queue, srun="echo 'srun: error: Unable to create step: x' >&2; exit 1")
    done = hpcddp("stacks")
    assert done.code == 3 and "no node answers: Unable to create step: x" in done.err


@pytest.mark.parametrize(("release", "shares_gpus"), [("22.05.8", True), ("20.11.7", False)])
def test_a_shell_on_slurm_is_a_step_on_the_ranks_node(
    site: Site, running: RunDir, release: str, shares_gpus: bool
) -> None:
    queue = (site.bin / "squeue").read_text().partition("\n")[2]
    site.slurm(squeue=queue, srun='echo "$*"; cat; exit 9')
    facts = read_json(running.attempt(1).facts) or {}
    write_json(running.attempt(1).facts, facts | {"site": {"version": release}})
    done = subprocess.run(
        [COMMAND, "shell", "last", "--rank", "2"], input="nvidia-smi\n", capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    words, _, stdin = done.stdout.partition("\n")
    assert (done.returncode, stdin) == (9, "nvidia-smi\n"), done.stderr
    assert words.startswith("--jobid=7 --overlap --nodelist=n2 --nodes=1 ")
    assert "--pty" not in words and words.endswith(f"shell {running.path} 1 2")
    # What the ranks hold it must not wait for.
    assert " --mem=0 " in words and ("--gres=none" not in words) is shares_gpus


def test_same_stacks_are_together_and_the_largest_group_is_first() -> None:
    same, other = (("a.py", 1, "f"),), (("a.py", 2, "f"),)
    stacks = [
        RankStack(3, "n2", 1, same),
        RankStack(1, "n1", 1, other),
        RankStack(0, "n1", 1, same),
    ]
    assert [(g.ranks, g.hosts) for g in grouped(stacks)] == [([0, 3], ["n1", "n2"]), ([1], ["n1"])]


@pytest.mark.parametrize(("begun", "said"), [("", ["0", "1", "2", "3"]), ("2", ["2"])])
def test_ranks_are_completed(
    site: Site, running: RunDir, begun: str, said: list[str], command: Command
) -> None:
    line = {"COMP_WORDS": f"hpcddp shell toy-1 --rank {begun}", "COMP_CWORD": "4"}
    done = command(**line, _HPCDDP_COMPLETE="bash_complete")
    assert [row.partition(",")[2] for row in done.out.splitlines()] == said, done.text
