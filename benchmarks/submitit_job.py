"""The floor of `goodput`: a DDP loop that submitit submits and requeues.

python submitit_job.py FOLDER WIDTH EVERY PAUSE    submits it and prints the job id

`checkpoint` saves and returns the same call, as submitit expects it for a job that continues after
a preemption or a time limit. Rank 0 also saves every EVERY steps, unless EVERY is 0, to a new file
that is then renamed.
"""

import os
import sys
from importlib import util
from itertools import count
from pathlib import Path
from typing import Any

import submitit

TASK = Path(__file__).with_name("heavy.py")


class Training:
    def __init__(self, task: str, folder: str, width: int, every: int, pause: float, port: int):
        self.given = (task, folder, width, every, pause, port)
        self.task, self.folder, self.width = task, Path(folder), width
        self.every, self.pause, self.port = every, pause, port
        self.at = 0  # the current step
        self.live: tuple[Any, Any] = (None, None)  # module and optimizer

    def __call__(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        me = submitit.JobEnvironment()
        os.environ |= {"MASTER_ADDR": me.hostnames[0], "MASTER_PORT": str(self.port)}
        dist.init_process_group("gloo", rank=me.global_rank, world_size=me.num_tasks)
        task = self._load()
        module = task.model(self.width)
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.live = (module, optimizer)
        dataset = task.dataset("train", self.width, self.pause)
        saved, first = self.folder / "saved.pt", 0
        if saved.exists():
            state = torch.load(saved, weights_only=True)
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["step"]
        for self.at in count(first + 1):
            batch, target = (x[None] for x in dataset[self.at % len(dataset)])
            task.loss(model(batch), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            if me.global_rank == 0 and self.every and self.at % self.every == 0:
                self.save(module, optimizer)

    def save(self, module: Any, optimizer: Any) -> None:
        import torch

        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        saved = self.folder / "saved.pt"
        torch.save(state | {"step": self.at}, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)
        (self.folder / "step").write_text(str(self.at))

    def _load(self) -> Any:
        spec = util.spec_from_file_location("heavy", self.task)
        assert spec and spec.loader
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        self.save(*self.live)  # submitit calls it on rank 0 only
        return submitit.helpers.DelayedSubmission(Training(*self.given))


def main(folder: str, width: str, every: str, pause: str) -> None:
    from hpcddp.attempt.rendezvous import free_port

    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(
        nodes=2, ntasks_per_node=2, gpus_per_node=2, cpus_per_task=1, time=60, partition="low",
        setup=["export OMP_NUM_THREADS=1"],
    )  # fmt: skip
    training = Training(str(TASK), folder, int(width), int(every), float(pause), free_port())
    print(executor.submit(training).job_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
