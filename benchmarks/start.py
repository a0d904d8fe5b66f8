"""Time from sbatch to the first optimizer step of 2 x 4 ranks, beside a bare srun of a DDP loop.

On a real Slurm on this machine. Both sides request the same nodes, tasks, GPUs and CPUs, have the
same model and data, and make one step. Three rows share the floor: sbatch of the script from
`hpcddp render`, `hpcddp submit`, which calls sbatch through submitit, and sbatch of the script with
`--launcher srun`, whose ranks import torch one by one, as the floor's do.

A measurement starts when sbatch is called: a program of that name, first on PATH, records the time
and executes the real sbatch. On our side it ends with the `time` of the train record of step 1 in
the run's metrics.jsonl. Rank 0 reads that time after the optimizer step and after the reduction of
the first metrics, so the reduction counts too. On the floor's side, rank 0 reads the time after its
optimizer step.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp.attempt.rendezvous import free_port
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, read_lines

LIMIT, SRUN = 0.35, 1.10
NODES, GPUS = "2", "4"
BATCH, WIDTH = "12", "24"  # as in jobs/digits.toml: 96 samples over 8 ranks
SHAPE = ["--nodes", NODES, "--gpus", GPUS, "--sbatch", "cpus-per-task=1"]
JOB = [*SHAPE, "--set", "max_steps=1"]
LINE = str(Path(__file__).with_name("first_line.py"))
LOOP = str(Path(__file__).with_name("ddp_loop.py"))
BARE = """\
#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node={gpus} --gpus-per-node={gpus} --cpus-per-task=1
export OMP_NUM_THREADS=1 MASTER_PORT={port}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task=1 --distribution=block {command}
"""


def rows(site: Site) -> Iterator[Row]:
    cluster = Cluster(site)
    rendered, submitted, srun, bare = site.interleave(
        "start",
        cluster.rendered,
        cluster.submitted,
        lambda: cluster.rendered("--launcher", "srun"),
        cluster.bare,
    )
    yield Row("start, render", rendered, bare, ratio_limit=LIMIT)
    yield Row("start, submit", submitted, bare, ratio_limit=LIMIT)
    yield Row("start, srun", srun, bare, ratio_limit=SRUN)


class Cluster:
    """The ways to a first step; each returns seconds."""

    def __init__(self, site: Site) -> None:
        self.site = site
        folder = site.fresh()
        self.called = folder / "called"  # has the time of the last call of sbatch
        self.environ = site.slurm | {"PATH": f"{folder}:{site.slurm['PATH']}"}
        real = shlex.quote(str(shutil.which("sbatch")))
        wrapper = folder / "sbatch"
        stamp = shlex.quote(str(self.called))
        wrapper.write_text(f'#!/bin/sh\ndate +%s.%N >{stamp}\nexec {real} "$@"\n')
        wrapper.chmod(0o755)

    def rendered(self, *how: str) -> float:
        folder = self.site.fresh()
        self._sbatch(folder, output([HPCDDP, "render", *JOB, *how], self.environ, folder))
        (run,) = (folder / "runs").iterdir()
        return self._since_call(_first_step(RunDir(run)))

    def submitted(self) -> float:
        command = [HPCDDP, "submit", *JOB, "--detach", "--json"]
        said = json.loads(output(command, self.environ, self.site.fresh()))
        self.site.wait(said["job_id"])
        return self._since_call(_first_step(RunDir(said["path"])))

    def bare(self) -> float:
        return self._since_call(self.by_hand(LOOP, "1", BATCH, WIDTH)[0])

    def program(self, launcher: str) -> float:
        """The floor's loop in a script of `hpcddp render` with a launcher."""
        return self._since_call(self.carried(launcher, LOOP, "1", BATCH, WIDTH)[0])

    def by_hand(self, script: str, *arguments: str) -> list[float]:
        """The figures that a Python script writes to its first argument, under a bare srun."""
        folder = self.site.fresh()
        command = shlex.join([PYTHON, script, str(folder / "said"), *arguments])
        self._sbatch(folder, BARE.format(nodes=NODES, gpus=GPUS, port=free_port(), command=command))
        return figures(folder)

    def carried(self, launcher: str, script: str, *arguments: str) -> list[float]:
        """The same figures for a script of `hpcddp render`."""
        folder = self.site.fresh()
        shape = [*SHAPE, "--launcher", launcher, "--name", "carried"]
        command = [PYTHON, script, str(folder / "said"), *arguments]
        rendered = output([HPCDDP, "render", *shape, "--", *command], self.environ, folder)
        self._sbatch(folder, rendered)
        return figures(folder)

    def first_line(self, launcher: str) -> float:
        """Seconds from the start of the batch script to the first line of the last rank.

        Slurm's delay of up to a second before the batch script does not count. Without a launcher
        the script is written by hand.
        """
        folder = self.site.fresh()
        command = [PYTHON, LINE, str(folder / "line")]
        text = BARE.format(nodes=NODES, gpus=GPUS, port=free_port(), command=shlex.join(command))
        if launcher:
            shape = [*SHAPE, "--launcher", launcher, "--name", "carried"]
            text = output([HPCDDP, "render", *shape, "--", *command], self.environ, folder)
        began = folder / "began"
        heads = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        self._sbatch(folder, text.replace(heads[-1], f"{heads[-1]}\ndate +%s.%N >{began}", 1))
        lines = [float(path.read_text()) for path in folder.glob("line.*")]
        return max(lines) - float(began.read_text())

    def _sbatch(self, folder: Path, text: str) -> None:
        script = folder / "job.sbatch"
        script.write_text(text)
        self.site.wait(output(["sbatch", "--parsable", str(script)], self.environ, folder))

    def _since_call(self, moment: float) -> float:
        return moment - float(self.called.read_text())


def figures(folder: Path) -> list[float]:
    """The figures that a script wrote."""
    found: list[float] = json.loads((folder / "said").read_text())
    return found


def _first_step(run: RunDir) -> float:
    """The time of the train record of step 1, in seconds since the epoch."""
    for record in read_lines(run.attempt(1).metrics):
        if record["event"] == "train" and record["step"] == 1:
            return float(record["time"])
    raise HpcddpError("no record of step 1", where=str(run.path), hint="see the run's log")
