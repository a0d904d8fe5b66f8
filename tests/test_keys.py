from __future__ import annotations  # a key table reads the types as they are written

import dataclasses
from dataclasses import dataclass
from datetime import date, time
from typing import Any

import pytest

from hpcddp.errors import JobFileError
from hpcddp.keys import Keys, control_character, key, nearest
from hpcddp.planning.clusters import KEYS as CLUSTER_KEYS
from hpcddp.spec import KEYS as JOB_KEYS


@dataclass
class Oven:
    heat: float = key(180.0, "degrees", least=0)
    fan: bool = key(False, "with air")


@dataclass
class Cake:
    name: str = key("", "what it is called")
    eggs: int = key(2, "how many", least=1)
    mode: str = key("top", "where from", choices=("top", "bottom"))
    notes: list[str] = key([], "remarks")
    oven: Oven = dataclasses.field(default_factory=Oven)
    slurm: dict[str, Any] = key({}, "options", scalar=True)
    model: dict[str, Any] = key({}, "arguments")


KEYS = Keys(Cake, {"oven": Oven})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("eggs", "3", 3),
        ("oven.heat", "2e2", 200.0),
        ("oven.fan", "true", True),
        ("oven.fan", "False", False),
        ("notes", "a 'b c'", ["a", "b c"]),
        ("name", "3", "3"),
        ("model.width", "16", 16),
        ("model.rate", "1e-3", 1e-3),
        ("model.layers", "[1, 2]", [1, 2]),
        ("model.kind", "resnet", "resnet"),
        ("slurm.exclusive", "true", True),
        ("slurm.time", "01:00:00", "01:00:00"),  # TOML has a time of day of this form
        ("slurm.begin", "2030-01-01", "2030-01-01"),
        ("slurm.comment", "0x10", "0x10"),
        ("slurm.comment", "5 # five", "5 # five"),
        ("slurm.mem", "1e3", "1e3"),
    ],
)
def test_text_becomes_what_the_key_is(name: str, text: str, value: Any) -> None:
    found = KEYS.check(name, text, "--set", text=True)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("eggs", 0, "at least 1"),
        ("eggs", "two", "a whole number"),
        ("eggs", True, "a whole number"),
        ("eggs", 2.0, "a whole number"),
        ("mode", "side", "one of top, bottom"),
        ("name", 3, "a string"),
        ("oven.heat", "hot", "a number"),
        ("oven.heat", float("nan"), "at least 0"),
        ("oven.fan", 1, "true or false"),
        ("notes", ["a", 1], "a list of strings"),
        ("slurm.time", [1], "a string, number or boolean"),
        (
            "model.since",
            [{"day": date(2030, 1, 1)}],
            "[{day = 2030-01-01}], but must be without dates",
        ),
        ("eggs", True, "eggs is true, but"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_place_and_remedy(
    name: str, value: Any, must: str
) -> None:
    with pytest.raises(JobFileError) as caught:
        KEYS.check(name, value, "cake.toml")
    assert caught.value.where == "cake.toml"
    assert name in caught.value.what
    assert must in caught.value.what


@pytest.mark.parametrize("value", ["a\nb", "a\x1b[31m", "\u2028", "\udcff"])
def test_what_enters_a_script_is_one_plain_line(value: str) -> None:
    with pytest.raises(JobFileError, match="control character"):
        KEYS.check("slurm.partition", value, "--partition")
    assert KEYS.check("model.text", value, "--set") == value  # this never meets a shell


def test_a_number_may_be_written_without_a_point() -> None:
    assert KEYS.check("oven.heat", 200, "cake.toml") == 200.0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("egs", "did you mean eggs?"),
        ("heat", "did you mean oven.heat?"),
        ("oven.haet", "did you mean oven.heat?"),
        ("ovne.heat", "did you mean oven.heat?"),
        ("oven.zzz", "known keys: oven."),
        ("oven", "oven is a table"),
        ("slurm", "slurm is a table"),
        ("slurm.", "did you mean slurm?"),
        ("zzz", "known keys: eggs, mode, model"),
    ],
)
def test_an_unknown_key_has_a_hint(name: str, hint: str) -> None:
    with pytest.raises(JobFileError) as caught:
        KEYS.resolve(name, "cake.toml")
    assert hint in caught.value.hint


def test_a_nested_table_fills_the_dataclass() -> None:
    data = {"eggs": 4, "oven": {"fan": True}, "slurm": {"time": "5"}, "model": {"a": {"b": 1}}}
    cake = KEYS.load(data, "cake.toml")
    assert cake == Cake(eggs=4, oven=Oven(fan=True), slurm={"time": "5"}, model={"a": {"b": 1}})
    assert KEYS.load(dataclasses.asdict(cake), "job.json") == cake


def test_two_of_a_kind_share_no_table() -> None:
    KEYS.load({"slurm": {"time": "5"}}, "cake.toml")
    assert KEYS.load({}, "cake.toml").slurm == {}


def test_where_there_is_nothing_the_hint_says_so() -> None:
    assert nearest("x", [], what="job") == "there is no job yet"


def test_unicode_and_blanks_are_no_control_characters() -> None:
    assert control_character("größe 10 µm 数 '\"$(x);%") == ""
    assert control_character("tab\there") == "U+0009"


def test_a_part_of_a_word_is_no_phrase() -> None:
    """ "global batch" stands in the text of another key too."""
    with pytest.raises(JobFileError) as caught:
        JOB_KEYS.resolve("global_batc", "mine.toml")
    assert caught.value.hint == "did you mean global_batch?"


@pytest.mark.parametrize("name", ["zzz", "zzz.qqq", "TRAIN"])
def test_an_unknown_key_or_table_names_the_nearest_or_the_tables(name: str) -> None:
    with pytest.raises(JobFileError) as caught:
        JOB_KEYS.resolve(name, "mine.toml")
    hint = caught.value.hint
    assert "did you mean" in hint or hint.startswith("known tables: train, ddp, pp, data,")
    assert len(hint) < 150


def test_messages_have_the_words_of_toml_and_not_of_python() -> None:
    values = {"epochs": True, "train.lr": [False, date(2030, 1, 2)], "slurm.begin": time(8, 30)}
    words = ("epochs is true,", "train.lr is [false, 2030-01-02],", "slurm.begin is 08:30:00,")
    for (name, value), text in zip(values.items(), words, strict=True):
        with pytest.raises(JobFileError) as caught:
            JOB_KEYS.check(name, value, "mine.toml")
        assert caught.value.what.startswith(text)


def test_a_key_says_its_type_default_and_limits_for_the_reference() -> None:
    row = JOB_KEYS.rows["train.schedule"]
    assert (row.type, row.default_text) == ("string", "'cosine'")
    assert row.choices == ("constant", "cosine")
    assert JOB_KEYS.rows["epochs"].limits == "at least 0"
    assert JOB_KEYS.rows["train.compile"].default_text == "false"
    assert JOB_KEYS.rows["command"].type == "list of strings"
    assert JOB_KEYS.rows["slurm"].type == "table" and JOB_KEYS.rows["name"].limits == ""


def test_every_key_has_a_text_for_the_reference() -> None:
    for name, row in {**JOB_KEYS.rows, **CLUSTER_KEYS.rows}.items():
        assert row.type and row.text, name
        assert not row.text.endswith(".") and len(row.text) <= 120, name
