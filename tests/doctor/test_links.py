from collections import Counter
from itertools import combinations

import pytest

from hpcddp.doctor import links


@pytest.mark.parametrize("count", range(2, 10))
def test_each_pair_of_nodes_meets_once_and_no_node_has_two_partners(count: int) -> None:
    met: Counter[tuple[int, int]] = Counter()
    for pairs in links.rounds(count):
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        met.update(pairs)
    assert met == Counter(combinations(range(count), 2))
