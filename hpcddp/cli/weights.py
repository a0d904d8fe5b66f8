"""`hpcddp export` and `import`: weights as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpcddp.cli.options import complete_jobs, complete_runs, plan_run, runs_option, runs_root
from hpcddp.cli.submit import carry_out, submit_options
from hpcddp.cli.terminal import say
from hpcddp.cli.terminal.sections import SectionCommand
from hpcddp.errors import UserError
from hpcddp.sizes import counted

# Suffix of a file -> its format.
SUFFIXES = {
    ".pt": "torch.save",
    ".pth": "torch.save",
    ".bin": "torch.save",
    ".ckpt": "torch.save",
    ".safetensors": "safetensors",
}
# Option -> why `import` refuses it, and a hint.
REFUSED = {
    "--no-snapshot": ("only jobs with a command have a code snapshot", "leave --no-snapshot out"),
}


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.argument("file", type=click.Path(dir_okay=False, writable=True))
@runs_option
def export(run: str, file: str, runs: str | None) -> None:
    """Write the newest weights of RUN to FILE, {parameter name: tensor}.

    The suffix of FILE chooses the format: .safetensors, or .pt, .pth, .bin or .ckpt for
    model.load_state_dict(torch.load(FILE)).
    """
    check_suffix(file)
    from hpcddp.submit import submission

    folder = submission.find(runs_root(runs), run)
    from hpcddp.train.checkpoint.plainfile import export as write

    step = write(folder, Path(file))
    click.echo(f"{file}: weights of {folder.name} at step {step}", err=True)


def check_suffix(file: str) -> None:
    """Refuse a file whose suffix names no format, before anything is read."""
    suffix = Path(file).suffix
    if suffix not in SUFFIXES:
        what = f"unknown suffix {suffix!r}" if suffix else "the name has no suffix"
        raise UserError(what, where=file, hint=f"known suffixes: {', '.join(SUFFIXES)}")


@click.command("import", cls=SectionCommand)
@click.argument("file", type=click.Path())
@click.argument("job", required=False, shell_complete=complete_jobs)
@submit_options(REFUSED)
def import_(file: str, job: str | None, runs: str | None, **given: Any) -> int:
    """Submit JOB as `hpcddp submit` does; its run starts from the weights in FILE.

    FILE holds {parameter name: tensor} with the names of JOB's model, as
    torch.save(model.state_dict(), FILE), safetensors or `hpcddp export` write it. No code in it is
    executed. A requeued or resumed run continues from its own checkpoints.
    """
    plan = plan_run(job, given | {"start_from": file}, runs_root(runs, new=True))
    from hpcddp.train.checkpoint.plainfile import read

    tensors = read(Path(plan.spec.start_from))
    values = sum(tensor.numel() for tensor in tensors.values())
    say.note(f"{file}: {counted(len(tensors), 'tensor')}, {values:,} values")
    return carry_out(plan, runs, **given)
