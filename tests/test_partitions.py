from sites import Site

from hpcddp.slurm import partitions
from hpcddp.slurm.partitions import Partition


def test_partitions_by_kind_of_node(site: Site) -> None:
    site.program(
        "sinfo",
        'echo "gpu*|64|gpu:a100:4(S:0-1)"; echo "gpu*|128+|gpu:8"; echo "cpu|32|(null)";'
        ' echo "mix|8|gpu:a:1,gpu:b:2,nvme:1"',
    )
    assert partitions.read() == [
        Partition("gpu", True, 64, 4),
        Partition("gpu", True, 128, 8),
        Partition("cpu", False, 32, 0),
        Partition("mix", False, 8, 3),
    ]
