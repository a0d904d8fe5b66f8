"""The stop flag under real signals."""

import os
import signal
import sys

import pytest
from ranks import make_run, records
from submitit.core.job_environment import SignalHandler

from hpcddp.preempt import STOP_SIGNALS, Preemption, ignore_stop_signals
from hpcddp.topology import Rank
from hpcddp.train.job import train
from hpcddp.train.rank.world import leave


@pytest.fixture
def preemption():
    numbers = (*STOP_SIGNALS, signal.SIGCONT, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield Preemption()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag_also_when_it_comes_twice(preemption, number):
    preemption.install()
    assert not preemption.requested
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert preemption.requested


def test_a_users_handler_is_called_and_comes_back(preemption):
    seen = []

    def own(number, frame):
        seen.append(number)

    signal.signal(signal.SIGTERM, own)
    preemption.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.requested and seen == [signal.SIGTERM]
    preemption.restore()
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_handler_that_was_set_later_is_taken_in_once(preemption):
    seen = []
    preemption.install()
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    preemption.install()
    preemption.install()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert preemption.requested and seen == [signal.SIGUSR2]


def test_a_handler_that_calls_the_one_it_replaced_is_called_once_and_so_is_the_first(preemption):
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append("first"))
    preemption.install()
    ours = signal.getsignal(signal.SIGUSR2)

    def polite(number, frame):
        seen.append("polite")
        ours(number, frame)

    signal.signal(signal.SIGUSR2, polite)
    preemption.renew()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert preemption.requested and seen == ["polite", "first"] * 2


OWN = """
import os, signal
seen = []
def own():
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
_model, _dataset, _loss = model, dataset, loss
def model():
    if WHERE == "model":
        own()
    return _model()
def dataset(split):
    if WHERE == split:
        own()
    return _dataset(split)
def loss(output, target):
    if not seen and output.requires_grad == (WHERE != "eval"):  # once, in evaluation or before
        os.kill(os.getpid(), signal.SIGUSR2)
    return _loss(output, target)
"""


@pytest.mark.parametrize("where", ["model", "train", "eval"])
def test_a_handler_that_a_task_sets_as_it_goes_takes_no_stop_away(tmp_path, preemption, where):
    run = make_run(tmp_path, extra=OWN + f"WHERE = {where!r}\n", epochs=2, max_steps=0)
    sys.modules.pop("small_task", None)
    preemption.install()
    try:
        assert train(run, Rank(0, 1, 0, 1, 0), 1, preemption) == "stopped"
    finally:
        leave()
    assert sys.modules["small_task"].seen == [signal.SIGUSR2]
    assert records(run, "end")[0]["step"] == (9 if where == "eval" else 1)


def test_submitits_handlers_are_taken_off(preemption):
    theirs = SignalHandler.__new__(SignalHandler)  # its methods are what submitit installs
    signal.signal(signal.SIGTERM, theirs.bypass)
    signal.signal(signal.SIGCONT, theirs.bypass)
    signal.signal(signal.SIGUSR2, theirs.checkpoint_and_try_requeue)
    preemption.install()
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR2):
        os.kill(os.getpid(), number)  # theirs would fail: they were never initialised
    assert preemption.requested
    assert signal.getsignal(signal.SIGCONT) == signal.SIG_DFL


def test_data_workers_ignore_all_of_them(preemption):
    ignore_stop_signals()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        os.kill(os.getpid(), number)  # this process would end
    assert not preemption.requested
