from pathlib import Path

from sites import Site

from hpcddp.slurm import node_samples

LINES = """\
NodeName=g1 Arch=x86_64 CoresPerSocket=64  CPUAlloc=0 CPUEfctv=112 CPUTot=128 Gres=gpu:mi250:8 \
OS=Linux 5.14.21-150500 #1 SMP  RealMemory=491520 MemSpecLimit=10240 CoreSpecCount=8 \
Sockets=1 ThreadsPerCore=2 State=IDLE CfgTRES=cpu=112,mem=480G
NodeName=old Arch=aarch64 CoresPerSocket=32 CPUTot=64 RealMemory=1000 Sockets=2 \
ThreadsPerCore=1 CoreSpecCount=4 State=IDLE
NodeName=cloud1 CoresPerSocket=4 CPUTot=8 RealMemory=30000 Sockets=1 ThreadsPerCore=2
"""


def test_what_a_node_leaves_to_jobs(site: Site) -> None:
    site.program("scontrol", f"echo \"$@\" >{site.folder}/asked; cat <<'E'\n{LINES}E")
    nodes = node_samples.read(["g1", "old", "cloud1"])
    asked = Path(site.folder, "asked").read_text()
    assert asked == "--oneliner show node g1,old,cloud1\n"
    new, old, cloud = nodes["g1"], nodes["old"], nodes["cloud1"]
    assert (new.cpus, new.cores, new.threads, new.memory_mb) == (112, 64, 2, 481280)
    assert (new.arch, new.os) == ("x86_64", "Linux 5.14.21-150500")
    assert (old.cpus, old.arch) == (60, "aarch64")  # a release without CPUEfctv
    assert (cloud.cpus, cloud.arch, cloud.os) == (8, "", "")


def test_no_node_is_no_call(site: Site) -> None:
    assert node_samples.read([]) == {}
