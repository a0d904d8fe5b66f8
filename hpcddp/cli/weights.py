"""`hpcddp export` and `import`: weights as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpcddp.cli.options import complete_jobs, complete_runs, plan_run, runs_option, runs_root
from hpcddp.cli.submit import carry_out, submit_options


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.argument("file", type=click.Path(dir_okay=False, writable=True))
@runs_option
def export(run: str, file: str, runs: str | None) -> None:
    """Write RUN's newest weights to FILE, for a plain model.load_state_dict(torch.load(FILE)).

    A FILE that ends in .safetensors is written in that form.
    """
    from hpcddp.submit import submission

    folder = submission.find(runs_root(runs), run)
    from hpcddp.train.checkpoint.plainfile import export as write

    step = write(folder, Path(file))
    click.echo(f"{file}: the weights of {folder.name} at step {step}", err=True)


@click.command("import")
@click.argument("file", type=click.Path())
@click.argument("job", required=False, shell_complete=complete_jobs)
@submit_options
def import_(file: str, job: str | None, runs: str | None, **given: Any) -> int:
    """Submit JOB as `hpcddp submit` does; its run starts from the weights in FILE.

    FILE holds {name: tensor} by the names of JOB's model, as torch.save(model.state_dict(), FILE)
    or safetensors write it. Nothing that it holds is run. A run that comes back goes on from its
    own checkpoints.
    """
    plan = plan_run(job, given | {"start_from": file}, runs_root(runs))
    from hpcddp.train.checkpoint.plainfile import read

    tensors = read(Path(plan.spec.start_from))
    values = sum(tensor.numel() for tensor in tensors.values())
    click.echo(f"{file}: {len(tensors)} tensors, {values:,} values", err=True)
    return carry_out(plan, runs, **given)
