from hpcddp.doctor import node_summary


def results() -> dict[str, object]:
    """Two nodes with two ranks each; the second node is late, and does not see $HOME."""
    rows = []
    for rank in range(4):
        row = {"rank": rank, "node": rank // 2, "import_seconds": 2.0 + rank, "visible": 0.1,
               "clock": -0.2 * rank}  # fmt: skip
        if rank % 2 == 0:
            gpus = [{"name": "A100", "driver": "550.54"}] * 2
            row |= {"host": f"n{rank // 2}", "gpus": gpus, "address": f"10.0.0.{rank}",
                    "interface": "ib0", "libc": "glibc 2.36", "architecture": "x86_64",
                    "home": rank == 0, "writes": {"median": 0.004, "longest": 1.0}}  # fmt: skip
        rows.append(row)
    return {"ranks": rows}


def test_each_node_is_a_row_with_the_worst_of_its_ranks() -> None:
    assert list(node_summary.table(results())) == [
        ("n0", "2 A100", "550.54", "ib0", "3 s", "4 ms", "-0.2 s"),
        ("n1", "2 A100", "550.54", "ib0", "5 s", "4 ms", "-0.6 s"),
    ]
    *_, here = node_summary.table(results() | {"here": {"clock": 12.0}})
    assert here == ("here", "-", "-", "-", "-", "-", "+12 s")


def test_what_only_nodes_tell_is_one_line() -> None:
    assert node_summary.facts(results()) == (
        "interface ib0, GPU driver 550.54, libc glibc 2.36, CPUs x86_64; "
        "2 nodes: see the runs, do not all see $HOME"
    )
