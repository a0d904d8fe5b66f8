import pytest

from hpcddp import launchers, shipped
from hpcddp.errors import UserError


def test_a_backend_has_a_launcher_of_its_own() -> None:
    assert launchers.find("", "slurm").name == "srun"
    assert launchers.find("", "local").name == "spawn"


@pytest.mark.parametrize(
    ("name", "backend", "what"),
    [
        ("spawn", "slurm", "does not work with backend slurm"),
        ("srum", "slurm", "unknown launcher 'srum'"),
    ],
)
def test_a_launcher_that_cannot_be_used(name: str, backend: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        launchers.find(name, backend, "toy.toml")
    assert caught.value.where == "toy.toml"
    assert "srun" in caught.value.hint


@pytest.mark.parametrize("row", launchers.LAUNCHERS.values(), ids=lambda row: row.name)
def test_every_launcher_has_its_fragment(row: launchers.Launcher) -> None:
    assert (shipped.folder("templates") / row.fragment).is_file()
