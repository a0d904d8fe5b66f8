"""What a plan must fulfil: each check refuses with the value, its source and what to do."""

import re
import sys
from typing import Any

import pytest
from sites import Site, flags

from hpcddp.errors import ClusterError, UserError
from hpcddp.planning import checks
from hpcddp.planning.asked import Asked
from hpcddp.planning.jobfile import Layer
from hpcddp.strategy import Layout


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("name", "a b", "invalid name 'a b'"),
        ("name", "$(touch x)", "invalid name"),
        ("name", "../up", "invalid name"),
        ("name", "-rf", "invalid name"),
        ("name", "a\nb", "invalid name"),
        ("name", "ä" * 51, "invalid name"),
        ("global_batch", 97, "global_batch 97 does not divide over 2 x 4 = 8 ranks"),
        ("nodes", "1-5", "does not divide over 5 x 4 = 20 ranks"),
        ("env.A-B", "1", "invalid variable name 'A-B' in env"),
        ("env.RANK", "1", "which the launcher, the shell or the script sets"),
        ("env.SLURM_CONF", "1", "which the launcher, the shell or the script sets"),
        ("env.COMMAND", "1", "env sets COMMAND, which"),
        ("slurm.ntasks", 8, "ntasks=8 conflicts with the options of hpcddp"),
        ("slurm.ntasks_per_node", 8, "conflicts with the options of hpcddp"),
        ("slurm.nodes", 2, "conflicts with the options of hpcddp"),
        ("slurm.G", 2, "conflicts with the options of hpcddp"),
        ("slurm.gres", "gpu:4", "conflicts with the options of hpcddp"),
        ("slurm.job-name", "x", "conflicts with the options of hpcddp"),
        ("slurm.array", "1-3", "conflicts with the options of hpcddp"),
        ("slurm.Time", "1", "not the long name"),
        ("slurm.a=b", "1", "not the long name"),
        ("slurm.time", "abc", "invalid time limit 'abc'"),
        ("slurm.time", "1:2:3:4", "invalid time limit"),
        ("slurm.time", "-5", "invalid time limit"),
        ("strategy", "fspd", "unknown strategy 'fspd'"),
        ("strategy", "dp", "dp uses one process on one node"),
        ("strategy", "single", "single uses one process, but there are 2 x 4 = 8 ranks"),
        ("strategy", "pp=3,ddp", "pp=3 = 3, but there are 2 x 4 = 8 ranks"),
        ("slurm.qos", "", "qos is empty"),
        ("slurm.signal", "B:USR1@60", "invalid signal 'B:USR1@60'"),
        ("slurm.signal", "KILL", "invalid signal 'KILL'"),
        ("slurm.requeue", "maybe", "requeue is 'maybe', but must be true or false"),
        ("data.cache", "much", "'much'"),
    ],
)
def test_what_is_refused(site: Site, name: str, value: Any, what: str) -> None:
    asked = {"nodes": "2", "gpus": 4, name: value}
    with pytest.raises(UserError, match=re.escape(what)) as caught:
        site.plan(flags(*asked.items()))
    assert caught.value.where


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("nodes = 'two'", ""),  # in asked.py
        ("global_batch = 96\nnodes = '1-3'\ngpus = 2\nstrategy = 'pp=4,ddp'\n", ": strategy"),
        ("global_batch = 96\ngpus = 4\nstrategy = 'tp'\n[ddp]\njoin = true\n", ""),  # a conflict
        ("global_batch = 96\n[env]\nRANK = '1'\n", ""),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_file(site: Site, text: str, key: str) -> None:
    path = site.job("wide", text)
    with pytest.raises(UserError) as caught:
        site.plan(job="wide")
    assert caught.value.where == f"{path}{key}"


def test_a_batch_that_divides_is_offered(site: Site) -> None:
    with pytest.raises(UserError) as caught:
        site.plan(flags(("nodes", "2"), ("gpus", 5), ("global_batch", 96)))
    assert "90 or 100" in caught.value.hint
    with pytest.raises(UserError) as caught:
        site.plan(flags(("gpus", 100)))
    assert "such as 100" in caught.value.hint


@pytest.mark.parametrize(
    ("strategy", "nodes", "good", "bad", "over"),
    [
        ("pp=2,ddp=5", "5", 95, 96, "pp=2,ddp=5: 5 data ranks"),
        ("fsdp,tp=2", "5", 95, 96, "fsdp=5,tp=2: 5 data ranks"),
        ("pp=2,ddp", "1-3", 96, 94, "pp=2,ddp=3: 3 data ranks"),
        ("zero1", "1-3", 96, 94, "2 x 2 = 4 ranks"),
        ("hsdp=2", "1-4", 24, 28, "ddp=3,fsdp=2: 6 data ranks"),
    ],
)
def test_a_batch_divides_over_the_ranks_that_have_samples_of_their_own(
    site: Site, strategy: str, nodes: str, good: int, bad: int, over: str
) -> None:
    asked = (("strategy", strategy), ("nodes", nodes), ("gpus", 2))
    assert str(site.plan(flags(*asked, ("global_batch", good))).nodes) == nodes
    with pytest.raises(UserError) as caught:
        site.plan(flags(*asked, ("global_batch", bad), where="--set"))
    assert caught.value.what == f"global_batch {bad} does not divide over {over}"
    assert caught.value.where == "--set"


def test_cpus_per_gpu_beside_cpus_per_task_is_a_conflict(site: Site) -> None:
    for more in ((), (("slurm.cpus-per-task", 8),)):
        with pytest.raises(UserError) as caught:
            site.plan(flags(("slurm.cpus-per-gpu", 4), *more, where="--sbatch"))
        assert caught.value.what == (
            "cpus-per-gpu=4 conflicts with cpus-per-task, which hpcddp sets"
        )
        assert "use --sbatch cpus-per-task=4" in caught.value.hint
        assert caught.value.where == "--sbatch"


def test_any_number_of_nodes_of_a_range_has_a_mesh(site: Site) -> None:
    site.job("wide", "global_batch = 96\nnodes = '1-3'\nstrategy = 'pp=4,ddp'\n")
    with pytest.raises(UserError) as caught:
        site.plan(flags(("gpus", 2)), job="wide")
    assert caught.value.what == "pp=4 = 4, but there are 1 x 2 = 2 ranks"
    assert site.plan(flags(("gpus", 4)), job="wide").layout == Layout(pp=4, ddp=3)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        (("nodes", "4"), ("4 nodes", "has 3")),
        (("nodes", "1-4"), ("4 nodes", "has 3")),
        (("gpus", 8), ("8 GPUs per node", "has 4")),
        (("slurm.time", "1-0"), ("1-0", "12:00:00")),
    ],
)
def test_a_limit_is_refused_with_both_numbers(
    site: Site, asked: tuple[str, Any], numbers: tuple[str, str]
) -> None:
    path = site.profile("small", "nodes = 3\ngpus_per_node = 4\nmax_time = '12:00:00'")
    with pytest.raises(ClusterError) as caught:
        site.plan(flags(("cluster", "small"), ("global_batch", 480), asked))
    assert all(number in caught.value.what for number in numbers)
    assert caught.value.where == str(path)
    assert site.plan(flags(("cluster", "small"), ("nodes", "3"), ("gpus", 4))).nodes.max == 3


@pytest.mark.parametrize("variable", ["SBATCH_GPUS_PER_NODE", "SBATCH_DISTRIBUTION"])
def test_a_variable_of_sbatch_that_contradicts_the_map(
    site: Site, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UserError, match="conflicts with the options of hpcddp") as caught:
        site.plan()
    assert caught.value.where == variable
    assert site.plan(flags(("cluster", "local"))).backend == "local"


def test_a_variable_of_a_profile_may_not_hide_the_scripts_own(site: Site) -> None:
    path = site.profile("mine", "[variables]\nRUN = '/'")
    with pytest.raises(UserError, match="variables sets RUN") as caught:
        site.plan(flags(("cluster", "mine")))
    assert caught.value.where == str(path)


def test_a_name_may_have_letters_of_any_language(site: Site) -> None:
    assert site.plan(flags(("name", "größe_数-1.a+b"))).spec.name == "größe_数-1.a+b"


PYTHON = sys.executable


def command(*words: str, **more: Any) -> Layer:
    return flags(("command", list(words)), *((k.replace("__", "."), v) for k, v in more.items()))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["no-such-program"], "program 'no-such-program' not found"),
        (["./train.sh"], "'./train.sh' is not executable"),
        ([PYTHON, "no_such.py"], "script 'no_such.py' not found"),
        ([PYTHON, "-u", "-BP", "no_such.py"], "script 'no_such.py' not found"),
        (["env", "A=1", PYTHON, "no_such.py"], "script 'no_such.py' not found"),
        (["env", "A=1", "no-such-program"], "program 'no-such-program' not found"),
    ],
)
def test_a_program_or_script_that_is_not_there(site: Site, words: list[str], what: str) -> None:
    site.write("train.sh", "exit 0")  # not executable
    site.program("true", "exit 0")
    for layer in (command(*words), command("true", resume_command=words)):
        with pytest.raises(UserError, match=re.escape(what)) as caught:
            site.plan(layer, job=None)
        assert caught.value.where == "--set"


@pytest.mark.parametrize(
    ("name", "start"),
    [("train.py", "python ./train.py --lr 1"), ("train.sh", "bash ./train.sh --lr 1"), ("a", "")],
)
def test_a_script_without_its_x_bit_is_refused_with_what_to_do(
    site: Site, name: str, start: str
) -> None:
    site.write(name, "")
    with pytest.raises(UserError, match=f"'./{name}' is not executable") as caught:
        site.plan(command(f"./{name}", "--lr", "1"), job=None)
    assert f"`chmod +x ./{name}`" in caught.value.hint
    assert f"start it with `{start}`" in caught.value.hint or not start


@pytest.mark.parametrize(
    "words",
    [
        [PYTHON, "-m", "no_such_module"],
        [PYTHON, "-c", "pass"],
        [PYTHON, "sub/train.py"],
        ["./run.sh", "no_such.py"],  # its words are its own affair
        ["env", "-i", "no-such-program"],
    ],
)
def test_a_program_that_is_there_may_have_any_words(site: Site, words: list[str]) -> None:
    site.write("sub/train.py", "")
    site.write("run.sh", "#!/bin/sh\n").chmod(0o755)
    assert site.plan(command(*words), job=None).spec.command == words


def test_where_the_job_has_programs_of_its_own_none_is_looked_for(site: Site) -> None:
    site.profile("mine", "modules = ['cuda']")
    for more in ({"cluster": "mine"}, {"env__PATH": "/opt/bin"}):
        assert site.plan(command("no-such-program", **more), job=None).spec.command


def test_a_command_spreads_its_model_itself(site: Site) -> None:
    site.program("true", "exit 0")
    with pytest.raises(UserError, match="but a command distributes its model") as caught:
        site.plan(command("true", strategy="fsdp"), job=None)
    assert caught.value.where == "--set"


def test_the_code_is_checked_last_and_against_the_jobs_own_limit(site: Site) -> None:
    site.program("true", "exit 0")
    for name in ("train.py", "model.py"):
        site.write(name, "#" * 600_000)
    site.plan(command("true", snapshot_mb=2), job=None, runs=site.runs)
    with pytest.raises(UserError, match="more than 1 MB"):
        site.plan(command("true", snapshot_mb=1), job=None, runs=site.runs)
    with pytest.raises(UserError, match="unknown launcher"):
        site.plan(command("true", snapshot_mb=1, launcher="spam"), job=None, runs=site.runs)
    site.write("server.pem", "x")
    with pytest.raises(UserError, match="may be a secret"):
        site.plan(command("true", snapshot_mb=2), job=None, runs=site.runs)


def test_weights_are_a_file_until_a_run_has_begun(site: Site) -> None:
    asked = Asked.read([flags(("name", "toy"), ("start_from", "w.pt"))], [], {})
    with pytest.raises(UserError, match=re.escape(f"'{site.folder}/w.pt', which does not exist")):
        checks.check(asked, {}, site.folder, begun=False)
    checks.check(asked, {}, site.folder, begun=True)
    site.write("w.pt", "")
    checks.check(asked, {}, site.folder, begun=False)
    site.program("true", "exit 0")
    with pytest.raises(UserError, match="start_from requires a task"):
        site.plan(command("true", start_from="w.pt"), job=None)


def test_spares_count_within_the_limit_of_nodes(site: Site) -> None:
    site.profile("small", "nodes = 3")
    asked = (("cluster", "small"), ("nodes", "3"), ("gpus", 1))
    assert site.plan(flags(*asked)).nodes.max == 3
    with pytest.raises(ClusterError, match="4 nodes with spares requested") as caught:
        site.plan(flags(*asked, ("spares", 1)))
    assert caught.value.hint == "use --nodes 3 or fewer, of them --spares"


@pytest.mark.parametrize(
    "key", [("requeue.enabled", False), ("slurm.no-requeue", True), ("slurm.requeue", False)]
)
def test_spares_are_refused_where_no_lost_node_is_replaced(site: Site, key: Any) -> None:
    with pytest.raises(UserError, match="spares has no effect if requeue"):
        site.plan(flags(("spares", 1), key))
