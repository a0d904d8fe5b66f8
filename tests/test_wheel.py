"""What `pip install` brings: the wheel, and the sdist that another wheel can be built from."""

import re
import shutil
from pathlib import Path

import pytest
from packages import built, contents, copied, tracked, unpacked

from hpcddp import __version__

# Folder of the checkout -> its place in the wheel.
PLACES = {
    "hpcddp": "hpcddp",
    "templates": "hpcddp/templates",
    "jobs": "hpcddp/jobs",
    "share": f"hpcddp-{__version__}.data/data/share",
}
MADE = re.compile(r"PKG-INFO$|\w+\.egg-info/")  # by setuptools, in an sdist
SCHEMA = "share/hpcddp/schemas/probe.schema.json"

pytestmark = [
    pytest.mark.xdist_group("wheel"),  # one of the processes builds them
    pytest.mark.skipif(not tracked(), reason="no repository"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the unpacked sdist of the repository and a schema."""
    folder = tmp_path_factory.mktemp("packages")
    copy = copied(folder / "copy")
    (copy / SCHEMA).parent.mkdir(parents=True, exist_ok=True)
    (copy / SCHEMA).write_text("{}")
    wheel = built("wheel", copy, folder / "wheel")
    shutil.rmtree(copy / "build")
    sdist = unpacked(built("sdist", copy, folder / "sdist"), folder / "source")
    return wheel, sdist


def test_each_file_of_the_checkout_is_in_the_wheel(made: tuple[Path, Path]) -> None:
    parts = [name.partition("/") for name in [*tracked(), SCHEMA]]
    wanted = {f"{PLACES[top]}/{rest}" for top, _, rest in parts if top in PLACES}
    assert wanted - {*contents(made[0])} == set()


def test_nothing_else_is_in_the_wheel(made: tuple[Path, Path]) -> None:
    """No tests and no caches."""
    places = (*(f"{place}/" for place in PLACES.values()), f"hpcddp-{__version__}.dist-info/")
    names = {*contents(made[0])}
    assert {name for name in names if not name.startswith(places)} == set()
    assert not {name for name in names if "__pycache__" in name}


def test_the_sdist_is_the_repository(made: tuple[Path, Path]) -> None:
    """But for files whose names begin with a dot."""
    files = (str(path.relative_to(made[1])) for path in made[1].rglob("*") if path.is_file())
    wanted = {name for name in tracked() if not name.startswith(".")}
    assert {name for name in files if not MADE.match(name)} == {*wanted, SCHEMA}


def test_a_wheel_from_the_sdist_is_the_same(made: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = made
    again = built("wheel", sdist, tmp_path)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)
