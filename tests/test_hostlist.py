import time

import pytest
from ClusterShell.NodeSet import NodeSet
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import TopologyError
from hpcddp.slurm.hostlist import count_hosts, expand_hosts, first_host, nth_host
from hpcddp.slurm.hostlist_writer import compress_hosts

WORDS = st.sampled_from(["", "n", "gpu", "x", "-ib", ".site", "rack_"])
NUMBERS = st.one_of(st.integers(0, 120).map(str), st.integers(0, 120).map("{:03d}".format))
NAMES = st.tuples(st.sampled_from(["n", "gpu", "7x"]), NUMBERS, WORDS, NUMBERS, WORDS).map("".join)


@st.composite
def ranges(draw: st.DrawFn) -> str:
    """A range whose ends are equally long, as ClusterShell wants them."""
    low = draw(st.integers(0, 990))
    high = draw(st.integers(low, 999))
    return f"{low:03d}-{high:03d}" if draw(st.booleans()) else f"{low:03d}"


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("", []),
        ("login1", ["login1"]),
        ("n[1-3,05]", ["n1", "n2", "n3", "n05"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[99-101].site", ["n99.site", "n100.site", "n101.site"]),
        ("gpu[01-02]x[1-2]", ["gpu01x1", "gpu01x2", "gpu02x1", "gpu02x2"]),
        ("b,a[2,1],b", ["b", "a2", "a1", "b"]),
    ],
)
def test_brackets_expand_in_the_order_they_are_written(hostlist: str, hosts: list[str]) -> None:
    assert expand_hosts(hostlist) == hosts
    assert count_hosts(hostlist) == len(hosts)


@pytest.mark.parametrize(
    ("hosts", "hostlist"),
    [
        (["n1", "n2", "n3", "n05", "login1"], "n[1-3,05],login1"),
        (["n9", "n10", "n12"], "n[9-10,12]"),
        (["n09", "n10", "n010"], "n[09-10,010]"),
        (["gpu01x1", "gpu01x2", "gpu02x1", "gpu02x2"], "gpu[01-02]x[1-2]"),
        (["n1-ib0", "n2-ib0"], "n1-ib0,n2-ib0"),  # Slurm reads no text after a bracket
        (["n1x3", "n2x3"], "n1x3,n2x3"),
        (["a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2"], "a[1-2]b1c[1-2]"),
        (["n2", "n1", "n1"], "n[2,1,1]"),
        (["a", "a", "n1", "n1", "r1n2"], "a,a,n[1,1],r1n2"),
        (
            [f"a{i // 4}b{i // 2 % 2}c{i % 2}" for i in range(8)],
            "a0b[0-1]c[0-1],a1b[0-1]c[0-1]",  # it reads three pairs in another order
        ),
        ([f"r{i // 100:02d}n{i % 100:02d}" for i in range(10_000)], "r[00-99]n[00-99]"),
    ],
)
def test_names_are_written_shortly(hosts: list[str], hostlist: str) -> None:
    assert compress_hosts(hosts) == hostlist


@given(st.lists(NAMES))
def test_any_list_of_names_comes_back_in_its_order(hosts: list[str]) -> None:
    hostlist = compress_hosts(hosts)
    assert expand_hosts(hostlist) == hosts
    assert [nth_host(hostlist, index) for index in range(len(hosts))] == hosts


def test_numbers_too_long_for_brackets_come_back_too() -> None:
    nines = "n" + "9" * 18
    hosts = [nines, "n1" + "0" * 18, "n1" + "0" * 17 + "1", nines, "n" + "1" * 5000]
    assert expand_hosts(compress_hosts(hosts)) == hosts


@given(st.lists(NAMES, min_size=1, unique=True))
def test_clustershell_writes_what_we_read(hosts: list[str]) -> None:
    nodes = NodeSet.fromlist(hosts)
    assert expand_hosts(str(nodes)) == list(nodes)


@given(st.lists(NAMES, min_size=1, unique=True))
def test_clustershell_reads_what_we_write(hosts: list[str]) -> None:
    assert set(NodeSet(compress_hosts(hosts))) == set(hosts)


@given(st.lists(ranges(), min_size=1, max_size=4), st.lists(ranges(), min_size=1, max_size=1))
def test_clustershell_expands_alike(first: list[str], second: list[str]) -> None:
    hostlist = f"gpu[{','.join(first)}]x{second[0][:3]},n[{','.join(first)}]"
    assert set(expand_hosts(hostlist)) == set(NodeSet(hostlist))


@pytest.mark.parametrize(
    ("hostlist", "position", "why"),
    [
        ("n[1-2", 2, "without a ']'"),
        ("n1]", 3, "without a '['"),
        ("a,n[1-[2]]", 7, "inside"),
        ("a,,b", 3, "empty"),
        (",a", 1, "empty"),
        ("a,", 3, "empty"),
        ("n[]", 3, "neither"),
        ("n[1,]", 5, "neither"),
        ("n[1-]", 3, "neither"),
        ("n[a-b]", 3, "neither"),
        ("n[0-6/2]", 6, "'/'"),
        ("n[1,3-2]", 5, "is descending"),
        ("n[1-02]", 3, "padded"),
        ("a,-oProxyCommand", 3, "start with -"),
        ("a b", 2, "' '"),
        ("a\x1b[2J", 2, r"'\x1b'"),
        ("n\u0661", 2, "'\u0661'"),
        ("n[1-" + "9" * 5000 + "]", 3, "neither"),
        ("a,n[1-1000001]", 3, "1,000,000"),
        ("n[1-1000]x[1-1000],a", 20, "1,000,000"),
        ("n[0-999999999]x[0-999999999]x[0-999999999]", 1, "1,000,000"),
    ],
)
@pytest.mark.parametrize("read", [expand_hosts, first_host, count_hosts])
def test_a_bad_list_is_refused_at_its_position(read, hostlist, position, why) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TopologyError) as caught:
        read(hostlist)
    assert f"at character {position}," in caught.value.what
    assert why in caught.value.what
    assert caught.value.what.isprintable()


def test_a_million_hosts_are_the_most() -> None:
    assert count_hosts("n[1-1000000]") == 1_000_000
    assert nth_host("n[1-1000]x[0000-0999]", 999_999) == "n1000x0999"


@pytest.mark.parametrize("index", [-1, 3])
def test_a_host_that_is_not_in_the_list(index: int) -> None:
    with pytest.raises(TopologyError, match=f"no host {index} in") as caught:
        nth_host("n[1-3]", index)
    assert "length is 3" in caught.value.hint


def test_an_empty_list_has_no_first_host() -> None:
    with pytest.raises(TopologyError, match="no host 0 in"):
        first_host("")


@pytest.mark.parametrize("name", ["", "-x", "a,b", "n[1]", "a b", "a\n", "é"])
def test_what_is_no_host_name_is_not_written(name: str) -> None:
    with pytest.raises(TopologyError, match="invalid host name"):
        compress_hosts(["n1", name])


def test_ten_thousand_hosts_take_milliseconds() -> None:
    start = time.process_time()
    hosts = expand_hosts("n[0-9999]")
    assert nth_host(compress_hosts(hosts), 9_999) == "n9999"
    assert time.process_time() - start < 0.5  # about 0.02 s; this finds what grows with the square
