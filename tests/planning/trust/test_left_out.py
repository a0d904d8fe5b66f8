"""Which nodes a job avoids, on a recorded cluster with 14 GPU nodes."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import recorded
from sites import Outcome, Site

from hpcddp.attempt.nodes import node_events
from hpcddp.attempt.nodes.node_events import NodeEvent
from hpcddp.planning.trust.node_book import NodeBook
from hpcddp.rundir import RunDir

Command = Callable[..., Outcome]


@pytest.fixture
def book(site: Site, hpcddp: Command) -> NodeBook:
    recorded.install(site, "plain")
    assert hpcddp("cluster", "detect").code == 0
    return NodeBook(site.config / "hpcddp" / "clusters" / "plain.nodes")


def bad(book: NodeBook, host: str, times: int = 1) -> None:
    now = time.time()
    book.add(NodeEvent(host, "check", "GPU 0 is lost", f"run/{i}", now) for i in range(times))


def script(hpcddp: Command, *words: str) -> Outcome:
    done = hpcddp("submit", "toy", "--dry-run", "-p", "gpu", "--nodes", "2", "--gpus", "1", *words)
    assert done.code == 0, done.text
    return done


def met(hpcddp: Command, host: str) -> RunDir:
    """A submitted run that has met a bad node."""
    done = hpcddp("submit", "toy", "--detach", "--json")
    run = RunDir(Path(json.loads(done.out)["path"]))
    node_events.append(run, 1, [(host, "check", "GPU 0 is lost")])
    return run


def test_a_bad_node_is_left_out_with_the_reason(hpcddp: Command, book: NodeBook) -> None:
    bad(book, "g2")
    done = script(hpcddp)
    assert "#SBATCH --exclude=g2\n" in done.out
    assert "leaves out g2, until " in done.err and ": GPU 0 is lost; see" in done.err


def test_of_few_nodes_only_the_worst_is_left_out(hpcddp: Command, book: NodeBook) -> None:
    bad(book, "g2")
    bad(book, "g3", times=3)
    assert "#SBATCH --exclude=g3\n" in script(hpcddp).out


def test_the_jobs_own_lists_count(hpcddp: Command, book: NodeBook) -> None:
    bad(book, "g2")
    assert "#SBATCH --exclude=g5,g2\n" in script(hpcddp, "--sbatch", "exclude=g5").out
    assert "#SBATCH --exclude" not in script(hpcddp, "--sbatch", "nodelist=g2").out
    # sbatch reads a file of names, to which no name can be added.
    assert "#SBATCH --exclude=./bad.txt\n" in script(hpcddp, "--sbatch", "exclude=./bad.txt").out


def test_a_node_that_the_cluster_has_no_more_is_not_named(hpcddp: Command, book: NodeBook) -> None:
    bad(book, "old17")
    assert "#SBATCH --exclude" not in script(hpcddp).out


@pytest.mark.parametrize("partition", ["gpu", "gpu,gpu-debug"])  # both have the same nodes
def test_a_job_that_needs_all_nodes_gets_them(
    hpcddp: Command, book: NodeBook, partition: str
) -> None:
    bad(book, "g12")
    words = ("-p", partition, "--sbatch", "exclude=g[1-10]")  # two with the GPUs are left
    assert "#SBATCH --exclude=g[1-10]\n" in script(hpcddp, *words).out
    assert "#SBATCH --exclude=g[1-10],g12\n" in script(hpcddp, *words, "--nodes", "1").out


def test_the_command_shows_and_edits(hpcddp: Command, book: NodeBook) -> None:
    done = hpcddp("nodes")
    assert done.code == 0 and "no node had trouble" in done.err
    bad(book, "g2", times=2)
    done = hpcddp("nodes", "--avoid", "g[5-6]", "--for", "2-0")
    rows = [line.split() for line in done.out.splitlines()]
    assert [row[0] for row in rows] == ["NODE", "g5", "g6", "g2"]
    assert "GPU 0 is lost (2 times)" in done.out and "you left it out" in done.out
    data = json.loads(hpcddp("nodes", "--trust", "g2,g5", "--json").out)
    assert [row["host"] for row in data["nodes"]] == ["g6"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--avoid", "n["], "error: --avoid: "),
        (["--avoid", "n1", "--for", "soon"], "error: --for: "),
        (["--avoid", "n1", "--for", "UNLIMITED"], "--for: UNLIMITED is too long"),
        (["--for", "1-0"], "--for: requires --avoid"),
        (["--cluster", "none"], "unknown cluster 'none'"),
        (["--avoid", "g[2,21]"], "--avoid: g21 is not a node of this cluster\n  did you mean g"),
        (["--trust", "g2,g3"], "--trust: g3 has no history\n  known nodes: g2; `hpcddp nodes`"),
    ],
)
def test_a_mistake_is_refused(hpcddp: Command, book: NodeBook, words: list[str], said: str) -> None:
    bad(book, "g2")
    done = hpcddp("nodes", *words)
    assert done.code == 2 and said in done.err
    (row,) = json.loads(hpcddp("nodes", "--json").out)["nodes"]  # nothing has changed
    assert row["host"] == "g2" and row["why"] == "GPU 0 is lost"


def test_a_cluster_without_a_profile_shares_no_nodes_with_another(
    site: Site, hpcddp: Command
) -> None:
    """Two clusters with one home: both use the profile `slurm` until they are detected."""
    recorded.install(site, "plain")
    assert hpcddp("nodes", "--avoid", "g2").code == 0
    met(hpcddp, "g2")
    assert "#SBATCH --exclude=g2\n" in script(hpcddp).out
    (row,) = json.loads(hpcddp("nodes", "--json").out)["nodes"]
    assert [event["what"] for event in row["events"]] == ["GPU 0 is lost"]
    recorded.change(site, "scontrol", "s/^ClusterName .*/ClusterName = other/")
    assert "#SBATCH --exclude" not in script(hpcddp).out
    assert json.loads(hpcddp("nodes", "--json").out)["nodes"] == []
    recorded.install(site, "plain")
    assert hpcddp("cluster", "detect").code == 0  # what was known stays known
    assert json.loads(hpcddp("nodes", "--json").out)["nodes"] == [row]


def test_a_dry_run_leaves_the_book_as_it_is(hpcddp: Command, book: NodeBook) -> None:
    run = met(hpcddp, "g2")
    before = {path: path.read_bytes() for path in book.path.iterdir()}
    assert "#SBATCH --exclude=g2\n" in script(hpcddp).out
    assert {path: path.read_bytes() for path in book.path.iterdir()} == before
    assert hpcddp("submit", "toy", "--detach").code == 0
    shutil.rmtree(run.path)
    assert "#SBATCH --exclude=g2\n" in script(hpcddp).out  # the job has saved it


def test_without_slurm_there_are_no_nodes_to_choose(site: Site, hpcddp: Command) -> None:
    done = hpcddp("nodes", "--avoid", "n1")
    assert done.code == 2 and "name a cluster with --cluster" in done.err
    assert not list(site.config.rglob("*.nodes"))
