from sites import Site

from hpcddp.slurm import partitions

LINES = """\
PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A \
DefaultTime=NONE GraceTime=5 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 \
MaxCPUsPerNode=UNLIMITED Nodes=n[1-2] PriorityTier=1 RootOnly=NO OverSubscribe=NO \
PreemptMode=CANCEL State=UP TotalCPUs=4 TotalNodes=2 JobDefaults=(null) \
DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=125G,node=2,billing=4
PartitionName=gpu AllowGroups=ml,root DenyAccounts=guests AllowQos=normal,long Default=NO \
QoS=part_gpu DefaultTime=01:00:00 GraceTime=0 Hidden=YES MaxNodes=16 MaxTime=2-00:00:00 \
MinNodes=1 MaxCPUsPerNode=96 Nodes=g[1-20] PriorityTier=20 RootOnly=NO \
OverSubscribe=EXCLUSIVE PreemptMode=OFF State=DOWN TotalNodes=20 \
JobDefaults=DefCpuPerGPU=12,DefMemPerGPU=60000 DefMemPerCPU=2000 MaxMemPerCPU=4000 \
TRES=cpu=2000,gres/gpu=80,gres/gpu:a100=80
"""


def test_a_partition_of_every_limit_and_of_none(site: Site) -> None:
    site.program("scontrol", f"cat <<'E'\n{LINES}E")
    low, gpu = partitions.read()
    assert (low.name, low.default, low.open, low.grace) == ("low", True, True, 5)
    assert (low.max_time, low.default_time, low.max_nodes, low.accounts) == ("", "", None, ())
    assert (low.own_qos, low.preempt_mode, low.default_memory) == ("", "CANCEL", ("", 0))
    assert low.tres == {"cpu": "4", "mem": "125G", "node": "2", "billing": "4"}
    assert (gpu.default, gpu.hidden, gpu.open, gpu.exclusive) == (False, True, False, True)
    assert (gpu.groups, gpu.denied_accounts, gpu.qos) == (
        ("ml", "root"),
        ("guests",),
        ("normal", "long"),
    )
    assert (gpu.own_qos, gpu.max_time, gpu.default_time) == ("part_gpu", "2-00:00:00", "01:00:00")
    assert (gpu.min_nodes, gpu.max_nodes, gpu.max_cpus_per_node) == (1, 16, 96)
    assert (gpu.default_memory, gpu.max_memory) == (("gpu", 60000), ("cpu", 4000))
    assert gpu.cpus_per_gpu == 12 and gpu.tres["gres/gpu:a100"] == "80"


def test_a_value_may_contain_spaces_and_equal_signs() -> None:
    line = "NodeName=n1 OS=Linux 5.14.0 #1 SMP  RealMemory=64000 Reason=bad disk [root@2026] x"
    assert partitions.fields(line) == {
        "NodeName": "n1",
        "OS": "Linux 5.14.0 #1 SMP",
        "RealMemory": "64000",
        "Reason": "bad disk [root@2026] x",
    }
