"""The rows of `hpcddp strategies`: which there are on some ranks, and which are asked for."""

import pytest

from hpcddp import strategy
from hpcddp.compare.strategy_cases import Case, cases, chosen
from hpcddp.errors import UserError


def test_every_row_is_a_layout_of_its_ranks() -> None:
    for ranks in range(2, 17):
        rows = cases(ranks)
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            mesh = strategy.layout(row.strategy, 1, 1 if row.strategy == "single" else ranks)
            assert mesh.world_size == (1 if row.alone else ranks)


def test_four_ranks_have_products_of_two_and_eight_of_three() -> None:
    four = {row.name for row in cases(4)}
    assert {"single", "dp", "zero1", "hsdp=2", "pp 1f1b", "pp gpipe", "pp interleaved"} <= four
    assert {"pp=2,ddp=2", "fsdp=2,tp=2", "ddp=2,tp=2"} <= four
    assert {"pp=2,fsdp=2,tp=2", "hsdp=2", "pp=2,zero1=4"} <= {row.name for row in cases(8)}
    assert not [row.name for row in cases(3) if "=" in row.name]


def test_rows_are_chosen_by_name_by_strategy_or_made() -> None:
    assert [row.name for row in chosen(4, ["tp", "pp", "dp"])] == [
        "dp", "tp", "pp 1f1b", "pp gpipe", "pp interleaved",
    ]  # fmt: skip
    assert [row.name for row in chosen(4, ["pp gpipe", "pp gpipe"])] == ["pp gpipe"]
    assert chosen(4, ["tp=2,fsdp"]) == [Case("tp=2,fsdp", "tp=2,fsdp")]
    with pytest.raises(UserError, match="unknown strategy 'fdsp'") as caught:
        chosen(4, ["fdsp"])
    assert "fsdp" in caught.value.hint
