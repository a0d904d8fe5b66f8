"""The example of dask-pytorch-ddp, on hpcddp: transfer learning from images in S3.

    $ python docs/dask_pytorch_ddp.py BUCKET PREFIX
    $ hpcddp submit --nodes 2 --gpus 4 --launcher dask -- \
        python -m hpcddp.dask docs/dask_pytorch_ddp.py BUCKET PREFIX

The first line trains on a Dask cluster of this machine, the second one on that of a job.
docs/howto/dask.md goes through it line by line.
"""

import argparse
import datetime
import functools
import json
import multiprocessing as mp
import os
import pickle
import uuid
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from hpcddp.jobs import resnet as models
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import Subset
from torch.utils.data.distributed import DistributedSampler

import hpcddp.dask
from hpcddp.dask import dispatch
from hpcddp.dask.results import DaskResultsHandler
from hpcddp.data import S3ImageFolder

key = uuid.uuid4().hex
rh = DaskResultsHandler(key)


def resized(image, size):
    """An image as a tensor [3, size, size] of values from 0 to 1."""
    pixels = torch.from_numpy(np.array(image.convert("RGB").resize((size, size))))
    return pixels.permute(2, 0, 1) / 255


def run_transfer_learning(
    bucket, prefix, samplesize, n_epochs, batch_size, num_workers, size=224, save_every=100
):
    worker_rank = int(dist.get_rank())
    device = torch.device(0 if torch.cuda.is_available() else "cpu")
    transform = functools.partial(resized, size=size)
    whole_dataset = S3ImageFolder(bucket, prefix, transform=transform)
    # torchvision's resnet18, or where torchvision does not work a model of the same form: its wheel
    # does not load beside every torch (that of PyPI not beside a torch for CPUs).
    net = models.model(classes=len(whole_dataset.classes))
    model = net.to(device)
    model = DDP(model, device_ids=[0] if device.type == "cuda" else None)

    order = torch.randperm(len(whole_dataset), generator=torch.Generator().manual_seed(0))
    sample = Subset(whole_dataset, order[:samplesize].tolist())  # the same on all ranks
    train_sampler = DistributedSampler(sample)
    train_loader = torch.utils.data.DataLoader(
        sample,
        sampler=train_sampler,
        batch_size=batch_size,
        num_workers=num_workers,
        multiprocessing_context=mp.get_context("fork") if num_workers else None,
    )

    criterion = nn.CrossEntropyLoss().to(device)
    lr = 0.001
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    count = 0
    for epoch in range(n_epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for inputs, labels in train_loader:
            dt = datetime.datetime.now().isoformat()
            inputs = inputs.to(device)
            labels = labels.to(device)
            outputs = model(inputs)
            loss = criterion(outputs, labels)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += 1

            rh.submit_result(
                f"worker/{worker_rank}/data-{dt}.json",
                json.dumps(
                    {"loss": loss.item(), "epoch": epoch, "count": count, "worker": worker_rank}
                ),
            )
            if (count % save_every) == 0 and worker_rank == 0:
                rh.submit_result(f"checkpoint-{dt}.pkl", pickle.dumps(model.state_dict()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bucket")
    parser.add_argument("prefix")
    parser.add_argument("--samplesize", type=int, help="images that are used; all of them")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="images of a rank in a step")
    parser.add_argument("--workers", type=int, default=1, help="processes that read, of each rank")
    parser.add_argument("--size", type=int, default=224, help="height and width of an image")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--ranks", type=int, default=2, help="on this machine; a job has its own")
    asked = parser.parse_args()

    folder = Path(os.environ.get("HPCDDP_RUN_DIR", "."), "results")  # the run's, in a job
    # Of the job's cluster, or of one on this machine.
    with hpcddp.dask.client(n_workers=asked.ranks, threads_per_worker=1) as client:
        futures = dispatch.run(
            client, run_transfer_learning, asked.bucket, asked.prefix, asked.samplesize,
            n_epochs=asked.epochs, batch_size=asked.batch_size, num_workers=asked.workers,
            size=asked.size, save_every=asked.save_every,
        )  # fmt: skip
        rh.process_results(folder, futures)
    print(f"results are in {folder}")


if __name__ == "__main__":
    main()
