"""A model's sizes, for estimates of memory. The tensors have shapes and no values
(FakeTensorMode); if that fails, the model is built on the CPU.

``python -m hpcddp.train.model_sketch`` answers an Ask of model_query.py with a ModelProfile
(model_profile.py) or an error. It uses no process group, no GPU, and one sample of the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from hpcddp import spec as specs
from hpcddp.errors import HpcddpError, JobFileError
from hpcddp.model_profile import Amount, ModelProfile, TensorShare, Weight
from hpcddp.spec import JobSpec
from hpcddp.strategy import Layout
from hpcddp.train.activation_sizes import Watch, size_of
from hpcddp.train.input import batches
from hpcddp.train.parallel import cut, layer_plan, model, optim
from hpcddp.train.query_answer import answer
from hpcddp.train.rank import task_module as tasks
from hpcddp.train.rank.task_module import Task

SAMPLES = 2, 4  # sizes of the two measured micro-batches: two points define a line
ADAMW = 2  # numbers that AdamW keeps for each parameter


class Ask(NamedTuple):
    """A question about a job's model.

    Args:
        spec: the job's.
        workdir: the folder of submission.
        meshes: the layouts to be estimated.
        stages: possible numbers of pipeline stages.
    """

    spec: dict[str, Any]
    workdir: str
    meshes: list[list[Any]]
    stages: list[int]


class Sketcher:
    """Builds a job's model as often as needed, and measures it.

    Raises:
        JobFileError: the task or its model() is wrong.
    """

    def __init__(self, task: Task, job: JobSpec) -> None:
        self._task, self._job = task, job
        self._mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self.notes: list[str] = []
        self.module = self._first()
        self.parts, self._no_parts = self._find_parts()
        self._blocks = cut.blocks(task, self.module)
        self._sample = self._take_sample()

    def _first(self) -> nn.Module:
        try:
            return self._make()
        except HpcddpError:
            raise
        except Exception as error:
            self.notes.append(f"the model was built on the CPU: {_in_a_line(error)}")
            self._mode = contextlib.nullcontext()
        try:
            return self._make()
        except HpcddpError:
            raise
        except Exception as error:
            raise JobFileError(f"model() fails: {_in_a_line(error)}", where=self._task.name,
                               hint="`hpcddp run` shows the traceback") from None  # fmt: skip

    def _make(self) -> nn.Module:
        with self._mode:
            made: nn.Module = self._task.model()
            if self._job.train.precision == "fp64":
                _double(made)
            return made

    def _find_parts(self) -> tuple[list[str], str]:
        """The model's parts, and the reason if it cannot be divided: then it is one part."""
        try:
            return cut.parts(self._task, self.module), ""
        except JobFileError as error:
            return [""], error.what

    def _take_sample(self) -> Any:
        """A sample of the training set, or a string with the reason why there is none."""
        try:
            return self._task.dataset("train")[0]
        except Exception as error:
            return f"cannot read a sample: {_in_a_line(error)}"

    def weights(self) -> list[Weight]:
        """The parameters, with the optimizer's state of each."""
        kept, groups = self._state()
        return [
            Weight(name, p.element_size(), p.requires_grad, *kept[id(p)], groups.get(id(p), -1),
                   max(0, _place(name, self.parts)), _place(name, self._blocks))
            for name, p in self.module.named_parameters()
        ]  # fmt: skip

    def _state(self) -> tuple[dict[int, tuple[float, float]], dict[int, int]]:
        """The optimizer's state after a step, by parameter: bytes for each number, and bytes of a
        fixed size; and each parameter's group in the optimizer."""
        kept = {id(p): (0.0, 0.0) for p in self.module.parameters()}
        with self._mode:
            optimizer = optim.make_optimizer(self._task, self.module, self._job.train)
            groups = enumerate(optimizer.param_groups)
            group_of = {id(p): i for i, group in groups for p in group["params"]}
            try:
                return kept | _step(optimizer), group_of
            except Exception as error:
                self.notes.append(
                    f"the estimate is for AdamW, not for the job's optimizer: {_in_a_line(error)}"
                )
        every = [p for group in optimizer.param_groups for p in group["params"]]
        return kept | {id(p): (ADAMW * float(p.element_size()), 0.0) for p in every}, group_of

    def buffers(self) -> list[int]:
        """Bytes of buffers, by part."""
        sizes = [0] * len(self.parts)
        for name, buffer in self.module.named_buffers():
            sizes[max(0, _place(name, self.parts))] += size_of(buffer)
        return sizes

    def stages(self, count: int) -> list[list[int]]:
        """The parts of each of ``count`` stages."""
        if count == 1:
            return [list(range(len(self.parts)))]
        if self._no_parts:
            raise JobFileError(self._no_parts)
        stages = cut.stages(self._task, self.module, count)
        return [[self.parts.index(name) for name in stage] for stage in stages]

    def view(self, ranks: int) -> TensorShare:
        """The share of the model on one of ``ranks`` tp ranks."""
        module = self._make() if ranks > 1 else self.module
        plan = layer_plan.tp_plan(self._task, module, ranks) if ranks > 1 else {}
        with self._mode:
            for name, style in plan.items():
                _narrow(module.get_submodule(name), style, ranks)
        shapes = [list(p.shape) for p in module.parameters()]
        view = TensorShare(shapes, unknown=self._sample if isinstance(self._sample, str) else "")
        if view.unknown:
            return view
        try:
            adds = {name: isinstance(style, RowwiseParallel) for name, style in plan.items()}
            small, large = (self._pass(module, count, adds) for count in SAMPLES)
        except HpcddpError:  # training would fail likewise
            raise
        except Exception as error:
            return dataclasses.replace(view, unknown=f"a forward pass fails: {_in_a_line(error)}")
        lines: dict[str, Any] = {n: _lines(getattr(small, n), getattr(large, n)) for n in _LISTS}
        return TensorShare(shapes, **lines, inner=_lines([small.inner], [large.inner])[0])

    def _pass(self, module: nn.Module, count: int, plan: dict[str, bool]) -> Watch:
        """A forward pass of ``count`` samples, as in training."""
        train, cpu = self._job.train, torch.device("cpu")
        batch = batches.placed(default_collate([self._sample] * count), cpu,
                            double=train.precision == "fp64")  # fmt: skip
        if isinstance(self._mode, FakeTensorMode):
            batch = pytree.tree_map_only(Tensor, self._mode.from_tensor, batch)
        inputs, targets = batch
        watch = Watch(module, self.parts, self._blocks if train.recompute else (), plan)
        with self._mode, model.autocast(cpu, train.precision), watch.watching():
            self._task.loss(module(inputs), targets)
        return watch


_LISTS = ("saved", "passed", "reduced")


def _double(module: nn.Module) -> None:
    """As nn.Module.double, which fails on fake tensors that an object refers to."""
    made: dict[int, Tensor] = {}  # by the old tensor, so that tied parameters stay tied
    for part in module.modules():
        tables: list[dict[str, Any]] = [part._parameters, part._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                double = tensor.detach().double()
                if isinstance(tensor, nn.Parameter):
                    double = nn.Parameter(double, tensor.requires_grad)
                table[name] = made.setdefault(id(tensor), double)


def _step(optimizer: Optimizer) -> dict[int, tuple[float, float]]:
    """State after a step, by parameter: bytes for each number, and bytes of a fixed size."""
    kept = {}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in every:
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for parameter in every:
        values = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor)]
        like = [v for v in values if v.shape == parameter.shape and v.dim()]
        per_number = sum(v.element_size() for v in like)
        kept[id(parameter)] = float(per_number), float(size_of(values) - size_of(like))
        parameter.grad = None
    return kept


def _narrow(part: nn.Module, style: Any, ranks: int) -> None:
    """Shrink a layer to the share of one rank; other styles divide no parameters."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    rows = isinstance(style, ColwiseParallel) == isinstance(part, nn.Linear)
    for name, weight in part.named_parameters():
        if weight.dim() == 1 and isinstance(style, RowwiseParallel):
            continue  # the bias is not divided
        dim = 0 if rows or weight.dim() == 1 else 1
        shape = list(weight.shape)
        shape[dim] = -(-shape[dim] // ranks)
        setattr(part, name, nn.Parameter(weight.new_empty(shape), weight.requires_grad))


def _lines(small: Sequence[float], large: Sequence[float]) -> list[Amount]:
    """Bytes at two micro-batch sizes as a fixed part and a part per sample."""
    begin, step = SAMPLES[0], SAMPLES[1] - SAMPLES[0]
    each = [(b - a) / step for a, b in zip(small, large, strict=True)]
    return [Amount(a - begin * more, more) for a, more in zip(small, each, strict=True)]


def _place(name: str, modules: Iterable[str]) -> int:
    """The index of the module that holds the tensor of this name; -1 for none."""
    inside = (i for i, module in enumerate(modules) if not module or name.startswith(f"{module}."))
    return next(inside, -1)


def _in_a_line(error: Exception) -> str:
    """An exception in one line."""
    text = error.what if isinstance(error, HpcddpError) else str(error).strip().partition("\n")[0]
    return text if isinstance(error, HpcddpError) else f"{type(error).__name__}: {text}"[:200]


def _or_why(find: Callable[..., Any], *args: Any) -> Any:
    """The result, or the message of an error that the user can fix."""
    try:
        return find(*args)
    except HpcddpError as error:
        return error.what


def _micro(job: JobSpec, mesh: Layout) -> tuple[int, int]:
    """Samples of a rank's micro-batch, and micro-batches per step."""
    share = job.global_batch // mesh.data_size
    count = batches.split(share, job.train.micro_batch, *batches.chunks(job, mesh))
    return share // count, count


def sketch(ask: Ask) -> ModelProfile:
    """The profile of a job's model.

    Raises:
        JobFileError: the task or its model() is wrong.
    """
    job = specs.from_dict(ask.spec)
    try:
        task = tasks.load(job, ask.workdir)
    except HpcddpError:
        raise
    except Exception as error:
        raise JobFileError(f"cannot be imported: {_in_a_line(error)}", where=job.task) from None
    sketcher = Sketcher(task, job)
    meshes = [Layout(*mesh) for mesh in ask.meshes]
    return ModelProfile(
        sketcher.weights(),
        sketcher.buffers(),
        {count: _or_why(sketcher.stages, count) for count in {1, *ask.stages}},
        {ranks: _or_why(sketcher.view, ranks) for ranks in {1, *(mesh.tp for mesh in meshes)}},
        {str(mesh): _or_why(_micro, job, mesh) for mesh in meshes},
        torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0,
        sketcher.notes,
    )


if __name__ == "__main__":
    answer(lambda **asked: dataclasses.asdict(sketch(Ask(**asked))))
