"""Step 4: a run folder for a plan, with its record and its script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from hpcddp import record
from hpcddp.planning import plan as plans
from hpcddp.planning.asked import Asked
from hpcddp.planning.earlier_runs import Measured
from hpcddp.planning.jobfile import FORCED, Layer
from hpcddp.planning.plan import Plan
from hpcddp.planning.site import local_disks
from hpcddp.planning.trust.node_book import NodeBook
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, new_id, step_folders, write_bytes, write_json, write_text
from hpcddp.spec import KEYS
from hpcddp.submit import host_archive


def new_run(plan: Plan, root: Path, *, staged: bool = False) -> RunDir:
    """Create a run folder whose script plain sbatch can submit. After an error, none is left.

    Args:
        staged: its failures are made on purpose, and say nothing of the nodes.
    """
    run = RunDir(root / new_id(plan.spec.name))
    text = plan.render(run, plan.worker_command(run))
    run.create()
    try:
        if plan.code:
            from hpcddp.submit import code_snapshot

            code_snapshot.copy(plan.code, root, run.work)
        _record_versions(plan, run)
        _fill(plan, run, text)
        if plan.backend == "slurm" and not staged:
            _note(plan, run)
    except BaseException:  # also of a full disk, and of Ctrl-C
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def _note(plan: Plan, run: RunDir) -> None:
    """Note the run, so that what it meets on its nodes is gathered, and keep what earlier runs met:
    their folders may be removed."""
    book = NodeBook.of(plan.profile, os.environ, plan.site.cluster if plan.site else "")
    book.gather()
    book.register(run)


def _record_versions(plan: Plan, run: RunDir) -> None:
    """Record the Python and packages of a command. If the job has software or a PATH of its own,
    its first attempt does so."""
    if plan.spec.command and not plan.spec.own_programs:
        from hpcddp import versions

        environ = {**os.environ, **plan.environment()}
        write_json(run.versions, versions.installed(plan.spec.command[0], environ))


def _fill(plan: Plan, run: RunDir, text: str, created: float | None = None) -> None:
    write_bytes(run.host, host_archive.build())  # it also reads the records of older versions
    if plan.spec.software.own_python:
        from hpcddp.submit import package_archive

        write_bytes(run.package, package_archive.build())
    record.write(run, plan.record(run, created))
    write_script(run, text)


def renew(plan: Plan, run: RunDir, created: float) -> None:
    """Replace the plan of an existing run."""
    from hpcddp.attempt import refused_resume  # not needed for a new run

    text = plan.render(run, plan.worker_command(run))
    refused_resume.keep(run)
    _fill(plan, run, text, created)


def again(
    run: RunDir,
    flags: Layer,
    environ: Mapping[str, str],
    look: Callable[[Plan], None] = lambda plan: None,
    measured: Measured | None = None,
) -> Plan:
    """Plan a run again, and replace its plan; see ``planned_again``.

    Args:
        look: called with the plan before it replaces the old one.
    """
    plan = planned_again(run, flags, environ, measured)
    look(plan)
    renew(plan, run, record.read(run).created)
    return plan


def planned_again(
    run: RunDir, flags: Layer, environ: Mapping[str, str], measured: Measured | None = None
) -> Plan:
    """Plan a run with options over its own values; its folder does not change.

    Args:
        measured: the times of the run so far.

    Raises:
        ClusterError: a check-up found a folder of it missing on nodes.
    """
    job = record.read(run)
    before = _own_values(run, job, other_cluster=bool(flags.values.get("cluster")))
    begun, folder = has_saved(run), Path(job.workdir)
    plan = plans.make(
        Asked.read([flags, before], [], environ),
        environ=environ, folder=folder, begun=begun, measured=measured,
    )  # fmt: skip
    if plan.site:  # Slurm was asked
        local_disks.check_again(plan.spec, folder, run.path.parent, plan.profile.path)
    return plan


def _own_values(run: RunDir, job: JobRecord, *, other_cluster: bool) -> Layer:
    """The values of a run; on another cluster without those that belong to the old one."""
    before = Layer(file=str(run.job)).put_all(job.spec, str(run.job))
    before.sources |= dict.fromkeys(job.forced, FORCED)
    if other_cluster:
        # A value at its default would hide that of the new profile.
        unset = [name for name, value in before.values.items()
                 if name.startswith("software.") and value == KEYS.rows[name].default]  # fmt: skip
        for name in ("template", "launcher", *job.site_values, *unset):
            before.values.pop(name, None)
            before.sources.pop(name, None)
    else:
        before.put("cluster", job.cluster, str(run.job))
    return before


def has_saved(run: RunDir) -> bool:
    """Whether the run has checkpoints; also true if they cannot be read."""
    try:
        return bool(step_folders(run.checkpoints))
    except OSError:
        return True


def write_script(run: RunDir, text: str) -> None:
    """Write job.sbatch, executable for its owner."""
    write_text(run.script, text, 0o755)
