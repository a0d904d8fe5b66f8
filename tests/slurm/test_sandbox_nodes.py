"""Nodes of the sandbox are machines of their own."""

from .desk import Desk


def test_each_node_has_memory_of_its_own_for_files(desk: Desk) -> None:
    """It goes with the node's job, and is not this machine's."""
    write = 'echo "$SLURMD_NODENAME" >>/dev/shm/told; sleep 1; cat /dev/shm/told'
    words = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "sh", "-c", write)
    done = desk.slurm.run("srun", *words, cwd=desk.folder, check=True)
    assert sorted(done.stdout.split()) == sorted(desk.nodes[:2])
