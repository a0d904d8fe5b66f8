"""What a person sees on the first day: colours, times, widths, and the way of a resumed run."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sites import Outcome, Site, record_run
from terminal import Terminal
from toy_model import TOY

from hpcddp.attempt import decision, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir, write_json

Command = Callable[..., Outcome]
GREEN, RED = "\x1b[32m\x1b[1m", "\x1b[31m\x1b[1m"
ZONED = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z+-]\S*"


def ended(site: Site, name: str = "toy-1", outcome: str = decision.DONE) -> RunDir:
    """A run with one attempt."""
    run = RunDir(site.runs / name)
    run.create()
    record_run(run, (2, 2))
    write_json(run.submission, {"job_id": "7", "submitted": 10.0})
    ledger.begin(run, Attempt(0, "7", "n1", 1, "1", True, "n[1-2]", 20.0), lambda earlier: False)
    ledger.end(run, 1, int(outcome != decision.DONE), outcome)
    return run


def saved(run: RunDir, step: int) -> None:
    folder = run.checkpoints / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()


def on_a_terminal(*arguments: str, columns: int = 100, **environ: str | None) -> str:
    with Terminal(*arguments, columns=columns, **environ) as terminal:
        terminal.left()
        return terminal.raw.decode()


def test_states_have_colours_on_a_terminal(site: Site, command: Command) -> None:
    ended(site, "toy-1")
    ended(site, "toy-2", decision.CRASH)
    shown = on_a_terminal("ls")
    assert f"{GREEN}COMPLETED\x1b[0m" in shown and f"{RED}FAILED\x1b[0m" in shown
    assert f"{RED}FAILED\x1b[0m" in on_a_terminal("status", "toy-2")
    assert f"{RED}error:\x1b[0m" in on_a_terminal("status", "toy-3")
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        for arguments in (["ls"], ["status", "toy-3"]):
            assert "\x1b" not in on_a_terminal(*arguments, **environ)
    assert "\x1b" not in command("ls").text + command("status", "toy-3").text


def test_times_have_their_zone(
    site: Site, hpcddp: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        run = ended(site)
        facts = json.loads(run.attempt(1).facts.read_text())
        write_json(run.attempt(1).facts, facts | {"ended": 86400.0})
        assert hpcddp("ls").out.splitlines()[1].endswith("1970-01-02 09:00:00 JST")
        assert "since     1970-01-02 09:00:00 JST\n" in hpcddp("status").out
        assert "1970-01-01 09:00:20 JST" in hpcddp("why").out
        since = json.loads(hpcddp("status", "--json").out)["since"]
        assert since == "1970-01-02T09:00:00+09:00"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_newest_checkpoint_tells_the_step(site: Site, hpcddp: Command) -> None:
    """A program may record no steps, or none yet since it was requeued."""
    saved(ended(site), 300)
    assert "step      300\n" in hpcddp("status").out
    assert hpcddp("ls").out.splitlines()[1].split()[4] == "300"


def test_tables_are_whole_in_40_columns(site: Site) -> None:
    name = ended(site, "resnet-20261124-0915-1a2b").name
    for arguments, words in (
        (["ls"], ["state COMPLETED", "job 7", "size 2x4", "step -"]),
        (["why"], ["cause done", "hosts n[1-2]", "lost 0"]),
        (["status"], ["COMPLETED", "2 nodes x 4 GPUs"]),
        (["config", "toy", "--cluster", "slurm"], ["global_batch\n  value 96"]),
        (["config", "--explain"], ["train.lr\n  type number  default 0.001\n"]),
        (["ranks", "--gpus", "4", "--strategy", "pp=2,ddp"], ["rank node host local   pp  ddp"]),
    ):
        with Terminal(*arguments, columns=40, lines=2000) as terminal:
            terminal.left()
            lines = terminal.text.rstrip().splitlines()
            text = "\n".join(lines)
        assert all(word in text for word in words), text
        if arguments[0] in ("ls", "status"):
            assert name in text and re.search(ZONED, " ".join(text.split()))


def test_a_plan_is_whole_in_40_columns(site: Site) -> None:
    site.job("toy", "global_batch = 96\n", TOY)
    with Terminal("plan", "toy", "--gpus", "4", columns=40, lines=200) as terminal:
        terminal.left()
        text = terminal.text
    assert "ddp\n  weights 75K  grads 75K  optim 150K\n" in text
    assert max(map(len, text.splitlines())) <= 40


def test_a_pipe_has_no_width(site: Site, command: Command) -> None:
    ended(site)
    assert command("ls", COLUMNS="40").out.split("\n")[0].split() == [
        "RUN", "STATE", "JOB", "SIZE", "STEP", "SINCE",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["train.lr"], ["train.lr  (key of jobs)", "  Peak learning rate.", "  type    number",
                        "  default 0.001", "  allowed at least 0"]),
        (["train.precision"], ["  allowed one of fp32, bf16, fp16, fp64"]),
        (["gpus_per_node"], ["gpus_per_node  (key of cluster profiles)"]),
        (["nodes"], ["nodes  (key of jobs)", "nodes  (key of cluster profiles)"]),
        (["slurm.partition"], ["slurm  (key of jobs)", "  type    table"]),
        (["gpus"], ["  set by  --gpus, --procs, HPCDDP_GPUS, the job file"]),
    ],
)  # fmt: skip
def test_a_key_is_explained(
    site: Site, hpcddp: Command, arguments: list[str], lines: list[str]
) -> None:
    done = hpcddp("config", "--explain", *arguments)
    assert (done.code, done.err) == (0, "")
    printed = done.out.splitlines()
    assert [line for line in lines if line not in printed] == []


def test_all_keys_are_explained_in_tables_by_section(site: Site, hpcddp: Command) -> None:
    from hpcddp.planning.clusters import KEYS as CLUSTER
    from hpcddp.spec import KEYS

    done = hpcddp("config", "--explain")
    assert (done.code, done.err) == (0, "")
    first = [line.split()[0] for line in done.out.splitlines() if line]
    assert set(KEYS.rows) | set(CLUSTER.rows) <= set(first)
    assert sum(line.startswith("Keys of ") for line in done.out.splitlines()) == 13
    assert "[train]" in done.out and "Keys of cluster profiles\n" in done.out


def test_a_key_of_a_named_job_is_explained_with_its_value(site: Site, hpcddp: Command) -> None:
    done = hpcddp("config", "toy", "--explain", "global_batch", "--cluster", "slurm")
    assert f"  value   96 ({site.folder}/jobs/toy.toml)\n" in done.out
    assert "HPCDDP_GLOBAL_BATCH" in done.out and "--set global_batch=VALUE" in done.out


def local(site: Site, words: str, code: int) -> Path:
    """A template whose ranks are a line of shell."""
    launch = f"{{% block launch %}}( echo '0: {words}'; exit {code} ) &\n{{% endblock %}}"
    return site.write("mine.sh.j2", "{% extends 'local.sh.j2' %}" + launch)


def test_resume_shows_the_new_attempt_and_names_what_it_changes(
    site: Site, command: Command
) -> None:
    local(site, "the first attempt", 3)
    assert command("submit", "--cluster", "local", "--template", "mine.sh.j2").code == 1
    (run,) = (RunDir(path) for path in site.runs.iterdir())
    local(site, "the second attempt", 0)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    dry = command("resume", "last", "--set", "epochs=2", "--dry-run")
    assert dry.code == 0, dry.err
    assert dry.out.startswith("change  epochs: 1 -> 2\n#!/bin/bash\n") and "local rank" in dry.out
    named = command("resume", "last", "--env", "A=1", "--dry-run").out
    assert named.startswith("change  env.A: not set -> '1'\n#!/bin/bash\n")
    data = json.loads(command("resume", "last", "--set", "epochs=2", "--dry-run", "--json").out)
    assert (data["run"], data["changes"]) == (run.name, {"epochs": [1, 2]})
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    done = command("resume", "last", "--set", "epochs=2")
    assert done.code == 0, done.text
    assert "change  epochs: 1 -> 2\n" in done.out
    assert "0: the second attempt\n" in done.out and "the first attempt" not in done.text
    assert "the first attempt" in command("logs").out
