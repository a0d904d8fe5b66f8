"""What a script draws follows from its seeds and the step, and from a seed that it sets later."""

import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch

from hpcddp.train.input import step_seeds
from hpcddp.train.input.seeding import rng_state, set_rng_state
from hpcddp.train.input.step_seeds import StepSeeds, default_generators

CPU = torch.device("cpu")
Drawn = tuple[float, float, float]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (random, numpy.random):
        for name in (*step_seeds.SEEDING, *step_seeds.READING):
            if function := getattr(module, name, None):
                monkeypatch.setattr(module, name, function)
    state = rng_state(CPU)
    yield
    set_rng_state(state, CPU)


def drawn(
    steps: range,
    draws: int = 3,
    before: Callable[[int], object] = lambda step: None,
    restored: dict[str, torch.Tensor] | None = None,
) -> list[Drawn]:
    """The first numbers behind each step of a script that seeds with 1, and draws more.

    Args:
        restored: the state of the generators in the checkpoint.
    """
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    seeds, found = StepSeeds(default_generators(CPU)), []
    if restored:
        set_rng_state(restored, CPU)
    seeds.watch()
    for step in steps:
        before(step)
        seeds.seed(step)
        found.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
        for _ in range(draws):
            random.random()
            numpy.random.rand()
    return found


def test_a_steps_numbers_do_not_depend_on_those_before() -> None:
    whole = drawn(range(6))
    assert drawn(range(3, 6)) == whole[3:]
    assert drawn(range(6), draws=5000) == whole
    assert len({*whole}) == 6
    assert drawn(range(3, 6), restored=rng_state(CPU)) == whole[3:]


def test_a_seed_of_the_script_counts_from_then_on() -> None:
    """Each epoch with its own, on ranks whose generators differed before."""

    def epoch(step: int) -> None:
        if step == 2:
            random.seed(7)
            numpy.random.seed(7)

    whole, with_epoch = drawn(range(5)), drawn(range(5), before=epoch)
    assert with_epoch[:2] == whole[:2]
    for mine, other in zip(whole[2:], with_epoch[2:], strict=True):
        assert mine[0] != other[0] and mine[1] != other[1] and mine[2] == other[2]

    def otherwise(step: int) -> None:
        if step == 0:
            random.seed(99)
            numpy.random.seed(99)
        epoch(step)

    assert drawn(range(5), before=otherwise)[2:] == with_epoch[2:]


def test_a_state_that_a_script_gives_back_is_no_seed() -> None:
    """As around an evaluation with its own numbers."""

    def evaluation(step: int) -> None:
        if step == 2:
            before, numbers = random.getstate(), numpy.random.get_state()
            random.seed(0)
            numpy.random.seed(0)
            random.random()
            random.setstate(before)
            numpy.random.set_state(numbers)

    assert drawn(range(5), before=evaluation) == drawn(range(5))


def test_a_state_of_the_scripts_own_seed_counts() -> None:
    def epoch(step: int) -> None:
        if step == 2:
            random.seed(7)
            mine = random.getstate()
            random.random()
            random.setstate(mine)

    def otherwise(step: int) -> None:
        if step == 0:
            random.seed(99)
        epoch(step)

    assert drawn(range(5), before=otherwise)[2:] == drawn(range(5), before=epoch)[2:]


def seeds_of(own: int, later: int | None = None) -> list[tuple[int, ...]]:
    """The seeds of each step on a rank that seeds its CPU with 1 and its GPU otherwise.

    Args:
        later: what it seeds its GPU with before the third step.
    """
    cpu, gpu = torch.Generator().manual_seed(1), torch.Generator().manual_seed(own)
    seeds, steps = StepSeeds([cpu, gpu]), []
    gpu.manual_seed(99)  # restored from a checkpoint
    seeds.watch()
    for step in range(4):
        if step == 2 and later is not None:
            gpu.manual_seed(later)
        seeds.seed(step)
        steps.append((cpu.initial_seed(), gpu.initial_seed()))
    return steps


def test_a_seed_that_is_the_gpus_alone_counts_too() -> None:
    """Ranks with the same numbers on their CPUs may want others on their GPUs, as for dropout."""
    assert all(cpu == gpu for cpu, gpu in seeds_of(1))
    for mine, other in zip(seeds_of(2), seeds_of(3), strict=True):
        assert mine[0] == other[0] and mine[1] != other[1]
    assert seeds_of(2, later=3) == seeds_of(2)[:2] + seeds_of(3)[2:]


def test_a_watched_function_is_pickled_as_that_of_its_module() -> None:
    """A process that a script starts gets it with its target or its data."""
    StepSeeds(default_generators(CPU)).watch()
    for module in (random, numpy.random):
        for name in (*step_seeds.SEEDING, *step_seeds.READING):
            if function := getattr(module, name, None):
                assert pickle.loads(pickle.dumps(function)) is function
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    functions = pickle.dumps([random.getstate, numpy.random.set_state])
    shown = subprocess.run([sys.executable, "-c", code], input=functions, capture_output=True)
    assert b"bound method Random.getstate" in shown.stdout and b"RandomState" in shown.stdout


def test_states_that_a_script_reads_without_a_step_take_no_more_memory() -> None:
    twister = step_seeds._Twister(random)
    twister.watch()
    for _ in range(step_seeds.READ + 10):
        random.getstate()
        random.random()
    assert len(twister._ours) == step_seeds.READ
