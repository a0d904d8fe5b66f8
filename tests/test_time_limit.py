import pytest

from hpcddp.errors import UserError
from hpcddp.slurm import time_limit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:30:15", 5415),
        ("2-3", 183600),
        ("2-3:30", 185400),
        ("2-3:30:15", 185415),
        ("0-0:0:1", 1),
        ("90:00:00", 324000),
        ("0", float("inf")),
        ("UNLIMITED", float("inf")),
        ("infinite", float("inf")),
    ],
)
def test_times_in_slurms_forms(text: str, seconds: float) -> None:
    assert time_limit.seconds(text, "--time") == seconds


@pytest.mark.parametrize(
    "text", ["", "abc", "-5", "1:2:3:4", "1-", "-", "1-2:3:4:5", "1.5", "1h", " 1", "1\n", "٣"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UserError, match="invalid time limit") as caught:
        time_limit.seconds(text, "--time")
    assert caught.value.where == "--time"
    assert "d-h:m:s" in caught.value.hint
