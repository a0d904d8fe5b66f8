"""What needs a GPU; skipped where there is none."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sites import Outcome, Site
from toy import TOY

GPUS = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no GPU on this machine")]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_rank_a_gpu(site: Site, command: Callable[..., Outcome], precision: str) -> None:
    """As many ranks as GPUs train with NCCL, each on a GPU of its own."""
    site.job("toy", f"global_batch = {8 * GPUS}\nmax_steps = 12\n", TOY)
    done = command("submit", "--gpus", str(GPUS), "--set", f"train.precision={precision}", "--json")
    assert done.code == 0, done.text
    ended = json.loads(done.out.splitlines()[-1])
    assert (ended["state"], ended["step"]) == ("COMPLETED", 12)
    metrics = Path(ended["path"], "attempts/1/metrics.jsonl").read_text().splitlines()
    ranks = json.loads(metrics[0])
    assert ranks["backend"] == "nccl"
    assert [r["device"] for r in ranks["ranks"]] == [f"cuda:{i}" for i in range(GPUS)]
    assert len({r["uuid"] for r in ranks["ranks"]}) == GPUS


def test_more_ranks_than_gpus_train_on_the_cpu_and_say_so(
    site: Site, command: Callable[..., Outcome]
) -> None:
    site.job("toy", f"global_batch = {8 * (GPUS + 1)}\nmax_steps = 3\n", TOY)
    done = command("submit", "--gpus", str(GPUS + 1))
    assert done.code == 0, done.text
    assert f"gloo on CPU, {GPUS + 1} ranks" in done.out


def test_a_copy_beside_the_gpus_work_is_of_one_instant() -> None:
    """The host enqueues a step and its change of the weights while the copy is on its way."""
    import torch

    from hpcddp.train.checkpoint.host_copy import HostCopies

    device = torch.device("cuda", GPUS - 1)
    torch.cuda.set_device(device)
    weights = torch.zeros(1 << 26, device=device)  # 256 MB
    buffer = torch.zeros(1 << 20, device=device)
    work = torch.randn(4096, 4096, device=device)
    staging, places = HostCopies(device), set()
    for step in range(4):
        staging.take({"buffer": buffer}, {"weights": weights})
        thread = threading.Thread(target=staging.copy)
        thread.start()
        buffer.add_(1)
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)
        staging.join()
        weights.add_(1)
        thread.join()
        copies = staging.ready()
        assert all((copy == step).all() for copy in copies.values())
        assert all(copy.is_pinned() for copy in copies.values())
        places.add(copies["weights"].data_ptr())
    assert len(places) == 1


def test_a_forward_pass_is_timed_on_the_gpu_and_nobody_waits_for_it() -> None:
    import torch

    from hpcddp.train.monitor.timing import Clock, RankFigures

    device = torch.device("cuda", GPUS - 1)
    torch.cuda.set_device(device)
    module = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(64))).to(device)
    clock, inputs = Clock(device), torch.ones(8192, 8192, device=device)
    module(inputs)
    torch.cuda.synchronize()
    clock.watch([module])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    module(inputs)
    end.record()
    first = RankFigures(*clock.take(1, 1.0))
    clock.forget()
    assert not end.query() and str(first.busy_s) == "nan"  # it is still at it
    torch.cuda.synchronize()
    module(inputs)
    found = RankFigures(*clock.take(1, 1.0))
    assert found.busy_s == pytest.approx(begin.elapsed_time(end) / 1000, rel=0.2)
    assert found.memory >= torch.cuda.memory_allocated(device)
    torch.cuda.synchronize()  # else the next test finds the GPU at work


def test_a_gpu_that_is_busy_does_not_wait_for_data_and_nobody_waits_for_it() -> None:
    """Data that comes late costs nothing while the GPU has work."""
    import torch

    from hpcddp.train.monitor.timing import Clock, RankFigures

    device = torch.device("cuda", GPUS - 1)
    torch.cuda.set_device(device)
    clock, late = Clock(device), threading.Event()
    batches = clock.reading(iter(lambda: late.wait(0.2), True))  # each takes 0.2 s
    next(batches)
    torch.cuda.synchronize()
    idle = RankFigures(*clock.take(1, 1.0)).wait_s
    clock.forget()
    assert idle == pytest.approx(0.2, rel=0.2)
    torch.cuda._sleep(4_000_000_000)  # cycles: a second at least
    next(batches)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert RankFigures(*clock.take(1, 1.0)).wait_s < 0.01


def test_a_model_that_is_timed_is_captured_into_a_graph() -> None:
    import torch

    from hpcddp.train.monitor.timing import Clock, RankFigures

    device = torch.device("cuda", GPUS - 1)
    torch.cuda.set_device(device)
    clock, module = Clock(device), torch.nn.Linear(64, 64, device=device)
    clock.watch([module])
    inputs, side = torch.ones(4, 64, device=device), torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = module(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = module(inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(found, expected)
    assert RankFigures(*clock.take(1, 1.0)).busy_s > 0


def test_a_record_is_added_up_without_waiting_for_the_gpu() -> None:
    import torch
    from torch.distributed import HashStore

    from hpcddp.topology import Rank
    from hpcddp.train.meter import Meter
    from hpcddp.train.monitor.timing import Clock
    from hpcddp.train.rank.world import World

    device = torch.device("cuda", GPUS - 1)
    torch.cuda.set_device(device)
    meter = Meter(World(Rank(0, 1, 0, 1, 0), device, "nccl", [], HashStore()), Clock(device))
    loss, bad = torch.ones((), device=device), torch.zeros((), device=device)
    for _ in range(2):
        meter.add(loss, 3)
        meter.step(0.1, None)
        torch.cuda.set_sync_debug_mode("error")
        try:
            meter.add_up(bad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        values, _ = meter.read()
        assert (values["loss"], len(meter.ranks)) == (1, 1)


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_products_have_ten_bits(tf32: bool) -> None:
    import torch

    from hpcddp.spec import TrainSpec
    from hpcddp.train.setup import set_modes

    device = torch.device("cuda", GPUS - 1)
    products, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_modes(TrainSpec(tf32=tf32), device)
        a, b = (torch.randn(512, 512, device=device) for _ in range(2))
        exact = a.double() @ b.double()
        error = ((a @ b - exact).abs().max() / exact.abs().max()).item()
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = cudnn
    short = tf32 and torch.cuda.get_device_capability(device) >= (8, 0)
    assert (error > 1e-5) is short


def test_what_has_no_deterministic_form_is_refused() -> None:
    """And what has one gives the same bits twice."""
    import torch

    from hpcddp.spec import TrainSpec
    from hpcddp.train.setup import set_modes

    device = torch.device("cuda", GPUS - 1)
    index = torch.randint(0, 8, (1 << 20,), device=device)
    values = torch.randn(1 << 20, device=device)
    try:
        set_modes(TrainSpec(deterministic=True), device)
        one, two = (torch.zeros(8, device=device).index_add_(0, index, values) for _ in range(2))
        assert torch.equal(one, two)
        with pytest.raises(RuntimeError, match=r"put_ does not have a deterministic"):
            torch.zeros(8, device=device).put_(index[:9], values[:9])
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_step_that_is_saved_is_the_devices_and_nobody_waits_for_it() -> None:
    """Python has put another step behind a collective that never ends."""
    import torch

    from hpcddp.train.checkpoint.device_steps import DeviceSteps

    device = torch.device("cuda", GPUS - 1)
    torch.cuda.set_device(device)
    weights = torch.nn.Parameter(torch.zeros(1 << 25, device=device))  # 128 MB: more than a part
    optimizer = torch.optim.Adam([weights], lr=1.0, foreach=True)  # its counter is on the host
    steps = DeviceSteps(device, optimizer)

    def step(number: int) -> None:
        weights.grad = torch.ones_like(weights)
        steps.change()
        optimizer.step()
        steps.mark(number, {}, lambda: f"[{number}]")

    for number in (1, 2, 3):
        step(number)
    torch.cuda.synchronize()
    expected = weights.detach().cpu()
    torch.cuda._sleep(20_000_000_000)  # some seconds, as a collective without a peer
    step(4)
    began = time.monotonic()
    mark = steps.newest()
    assert mark and (mark.step, mark.meta) == (3, "[3]") and not steps.is_last(mark)
    state = optimizer.state[weights]
    held = steps.on_host({"weights": weights, "step": state["step"]}, mark)
    assert steps.holds(mark) and time.monotonic() - began < 3
    assert torch.equal(held["weights"], expected)
    assert (held["step"].item(), state["step"].item()) == (3, 4)
    torch.cuda.synchronize()
    assert not steps.holds(mark)
    newest = steps.newest()
    assert newest and newest.step == 4 and steps.is_last(newest)


@pytest.mark.parametrize("way", ["numbers", "item", "reserve"])
def test_what_a_gpu_holds_is_copied_while_the_loop_waits_for_a_number(way: str) -> None:
    """Or reserves pinned memory, as a loader does."""
    import torch

    from hpcddp.train.checkpoint.device_steps import DeviceSteps
    from hpcddp.train.rank.readout import Readout

    device = torch.device("cuda", GPUS - 1)
    torch.cuda.set_device(device)
    weights = torch.nn.Parameter(torch.arange(512.0 * 256, device=device).view(512, 256).T)
    steps, late = DeviceSteps(device, torch.optim.Adam([weights])), torch.ones(1, device=device)
    steps.mark(1, {}, lambda: "")
    readout, size = Readout(device, 1), 1 << 27
    ways = {
        "numbers": lambda: readout.numbers(late),
        "item": late.item,
        "reserve": lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True),
    }
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000_000)  # some seconds, as a collective without a peer
    loop = threading.Thread(target=ways[way])
    loop.start()
    loop.join(0.5)
    mark = steps.newest()
    assert mark
    held = steps.on_host({"weights": weights}, mark)
    assert steps.number(weights[-1, 0]) == 255
    assert not torch.cuda.current_stream().query()  # the device still stands still
    loop.join()
    assert torch.equal(held["weights"], torch.arange(512.0 * 256).view(512, 256).T)


def test_tensors_of_all_kinds_are_copied_as_they_are() -> None:
    import torch

    from hpcddp.train.checkpoint.device_steps import BOUNCE, DeviceSteps, StepMark

    device = torch.device("cuda", GPUS - 1)
    torch.cuda.set_device(device)
    steps = DeviceSteps(device, torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]))
    line = torch.arange(2.0 * BOUNCE // 4, device=device)
    square = line[:120].view(2, 3, 4, 5)
    tensors = {
        "long": line.view(2, -1).T,
        "slice": square[1, 1:, ::2, 3],
        "number": line[7],
        "expanded": line[5:7].expand(3, 2),
        "none": line[:0],
        "channels last": square.to(memory_format=torch.channels_last),
        "bool": square > 50,
        "bfloat16": square.bfloat16(),
        "complex": torch.view_as_complex(square[..., :2].contiguous()).transpose(0, 1),
    }
    found = steps.on_host(tensors, StepMark(1))
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())
