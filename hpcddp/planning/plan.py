"""Step 3: Plan = spec + cluster + topology + launcher, all checked.

A plan is complete when it is made, and never changes. It includes the times of earlier runs and the
files of the code snapshot. The user's code is not imported here: only the nodes import it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcddp import spec, strategy
from hpcddp.attempt import launch_facts
from hpcddp.errors import TemplateError
from hpcddp.launch.launchers import Launcher
from hpcddp.planning import (
    checks,
    gpu_request,
    launcher_choice,
    notes,
    rank_cpus,
    resources,
)
from hpcddp.planning.asked import Asked
from hpcddp.planning.clusters import Profile
from hpcddp.planning.earlier_runs import LEAD, Measured
from hpcddp.planning.gpu_request import GpuRequest
from hpcddp.planning.jobfile import FORCED
from hpcddp.planning.script import header
from hpcddp.planning.script.header import Origin
from hpcddp.planning.site import job_fit, local_disks
from hpcddp.planning.software import software_checks, software_facts
from hpcddp.planning.trust import left_out
from hpcddp.planning.trust.left_out import LeftOut
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir
from hpcddp.sizes import NodeRange, counted
from hpcddp.slurm.rules import Site
from hpcddp.spec import JobSpec
from hpcddp.strategy import Layout
from hpcddp.topology import Topology

if TYPE_CHECKING:
    from hpcddp.planning.code_files import CodeFiles

# Slurm sends it before the time limit, up to half a minute too early. The ranks know the limit and
# stop later by themselves. So it is requested only where preemption sends it in place of TERM.
SIGNAL = "USR2"
# Slurm's log on the node, used until the run folder can be written; the attempt then copies it into
# the run's log. %j is the job id.
NODE_LOG = "/tmp/hpcddp-{run}-%j.log"


@dataclass(frozen=True)
class Plan:
    """A checked plan, with all that rendering and submitting need. `make` makes it."""

    spec: JobSpec
    sources: Mapping[str, str]
    profile: Profile
    nodes: NodeRange  # that train
    allocated: NodeRange  # with the spares
    gpus: int
    launcher: Launcher
    template: Path
    cpus_per_task: int
    gpu_request: GpuRequest
    workdir: Path
    notes: tuple[str, ...]  # for the user
    warnings: tuple[str, ...]  # likewise, of what may cost something
    site: Site | None  # the rules of Slurm and of the job's partition, if Slurm answered
    measured: Measured | None  # the times of an earlier run of the job
    code: CodeFiles | None  # the files of the code snapshot, if there is one
    slurm_missing: bool = False  # the cluster is this machine because Slurm was not found
    left_out: tuple[LeftOut, ...] = ()  # nodes that the job avoids
    memory: int = 0  # MB to ask for on each node; 0 for none
    imported: float = 0.0  # seconds of the import of torch in a check-up; 0 if unknown
    origin: Origin = Origin()

    @property
    def start_note(self) -> str:
        """A note for a user who starts the job; "" for none."""
        ranks = counted(self.topology.world_size, "rank")
        return f"Slurm not found; running {ranks} on this machine" if self.slurm_missing else ""

    @property
    def topology(self) -> Topology:
        """The map at its largest."""
        return Topology(self.nodes.max, self.ranks_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Number of training processes per node: one per GPU, or one that uses all GPUs."""
        return strategy.processes(self.spec.strategy, self.gpus)

    @property
    def layout(self) -> Layout:
        """The mesh at its largest."""
        return strategy.layout(self.spec.strategy, self.nodes.max, self.gpus)

    @property
    def backend(self) -> str:
        return self.profile.cluster.backend

    def folder(self, run: RunDir) -> Path:
        """Where the job works."""
        return run.work / self.code.below if self.code else self.workdir

    @property
    def signal(self) -> str:
        """The signal before the time limit, and its lead in seconds; "" for none."""
        if "signal" in self.spec.slurm or not (self.site and self.site.user_signal):
            return str(self.spec.slurm.get("signal", ""))
        return f"{SIGNAL}@{self.measured.lead if self.measured else LEAD}"

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job may continue, in place, when a node is lost."""
        spared = launcher_choice.outlives_nodes(self.spec, self.launcher, self.nodes)
        return spared and self.backend == "slurm"

    @property
    def checks_nodes(self) -> bool:
        """Whether the nodes are checked while the ranks start: only of several nodes one can be
        missed."""
        return self.backend == "slurm" and self.allocated.max > 1 and self.spec.preflight != "off"

    def worker_command(self, run: RunDir) -> list[str]:
        """How a rank starts."""
        python = software_facts.python(self.spec.software)
        return [python, "-P", "-m", "hpcddp.worker", str(run.path)]

    def record(self, run: RunDir, created: float | None = None) -> JobRecord:
        """job.json, for the nodes and for later commands."""
        cluster, cluster_file = self.profile.cluster, str(self.profile.path)
        return JobRecord(
            run=run.name,
            spec=spec.to_dict(self.spec),
            nodes=[self.nodes.min, self.nodes.max],
            gpus_per_node=self.gpus,
            backend=self.backend,
            workdir=str(self.folder(run)),
            cluster=cluster_file,
            launcher=self.launcher.name,
            launch=launch_facts.to_say(self.launcher.name, self.launcher.facts),
            host_suffix=cluster.host_suffix,
            poll_seconds=cluster.poll_seconds,
            lead=int(self.signal.partition("@")[2] or 0),
            created=time.time() if created is None else created,
            forced=[n for n, source in self.sources.items() if source == FORCED],
            left_out={row.host: row.until for row in self.left_out},
            container=software_facts.entrance(self.spec, self._software(run)),
            site_values=[n for n, source in self.sources.items() if source == cluster_file],
        )

    def environment(self) -> dict[str, str]:
        """The environment of the job's processes, without the variables of a rank."""
        environ = {"OMP_NUM_THREADS": str(self.cpus_per_task), "PYTHONUNBUFFERED": "1"}
        if self.spec.device == gpu_request.CPU:
            environ |= dict.fromkeys(gpu_request.HIDDEN, "")
        interface = self.profile.cluster.interface or ("lo" if self.backend == "local" else "")
        if interface:
            environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        if "signal" in self.spec.slurm:
            name = str(self.spec.slurm["signal"]).partition("@")[0].removeprefix("SIG")
            environ["HPCDDP_SIGNAL"] = name
        return environ | {n: _env_text(v) for n, v in self.spec.env.items()}

    def directives(self, run: RunDir) -> list[tuple[str, Any]]:
        """The sbatch options in the order of the script."""
        if re.search("%[jtAa]", str(run.path)):
            raise TemplateError(
                "%j, %t, %A and %a are not allowed in the path of a run",
                where=str(run.path),
                hint="use another folder with --runs",
            )
        others = ("requeue", "no-requeue", "cpus-per-task")  # said by keys of their own
        options = {n: v for n, v in self.spec.slurm.items() if n not in others}
        rows: list[tuple[str, Any]] = [
            ("job-name", run.name),
            ("nodes", self.allocated),
            ("ntasks-per-node", self.ranks_per_node),
            ("cpus-per-task", self.cpus_per_task),
            ("chdir", self.folder(run)),
            *([] if "output" in options else [("output", NODE_LOG.format(run=run.name))]),
            ("open-mode", "append"),
            ("requeue" if self.spec.requeue.enabled else "no-requeue", True),
            *([("no-kill", True)] if self.outlives_nodes else []),
        ]
        if option := self.gpu_request.option:
            more = [str(options.pop("gres"))] if option in options else []
            rows.insert(3, (option, ",".join([self.gpu_request.value, *more])))
        rows += [("mem", f"{self.memory}M")] if self.memory else []
        if self.signal:
            options["signal"] = self.signal
        if self.left_out:
            own = [str(options["exclude"])] if options.get("exclude") else []
            options["exclude"] = ",".join([*own, *(row.host for row in self.left_out)])
        return rows + sorted(options.items())

    def _software(self, run: RunDir) -> dict[str, Any]:
        """The shell variables of the job's software."""
        folders = run.path.parent, self.workdir, self.folder(run)
        gpus = gpu_request.asks(self.spec, self.gpu_request)
        return software_facts.variables(self.spec, *folders, gpus=gpus)

    def render(self, run: RunDir, command: list[str]) -> str:
        """The script that starts `command` once per rank."""
        from hpcddp.planning.render import TemplateContext, render

        trackers = self.spec.metrics.trackers
        variables: dict[str, Any] = {
            "RUN": str(run.path),
            "WORKDIR": str(self.folder(run)),
            "PYTHON": sys.executable,
            "NODES": str(self.nodes.max),
            "GPUS_PER_NODE": self.ranks_per_node,
            "CPUS_PER_TASK": self.cpus_per_task,
            **self._software(run),
            **{n: _env_text(v) for n, v in self.profile.cluster.variables.items()},
            "ENVIRONMENT": [f"{n}={v}" for n, v in self.environment().items()],
            "COMMAND": command,
            **({"TRACKERS": trackers} if trackers else {}),
        }
        facts = TemplateContext(
            self.directives(run),
            variables,
            self.launcher.fragment,
            self.launcher.ending,
            header=list(header.lines(self.origin, self.spec)),
            software=software_facts.facts(self.spec),
            program=bool(self.spec.command),
            trackers=bool(trackers),
            backend=self.backend,
            returns=self.spec.requeue.enabled,
            here=self.spec.requeue.here and "here" in self.launcher.facts,
            no_kill=self.outlives_nodes,
            preflight=self.checks_nodes,
        )
        return render(self.template, resources.folder("templates"), facts)


def make(
    asked: Asked,
    *,
    environ: Mapping[str, str],
    folder: Path,
    begun: bool = False,
    measured: Measured | None = None,
    runs: Path | None = None,
) -> Plan:
    """The complete plan of a job; UserError for the first error in it.

    Args:
        environ: the user's environment.
        folder: the current folder, where the job will work.
        begun: the run has saved a checkpoint; files that only a new run reads may be missing.
        measured: the times of an earlier run of the job.
        runs: the folder of the runs, for a new run.
    """
    checks.check(asked, environ, folder, begun=begun)
    template = resources.template(asked.spec.template, asked.profile, asked.sources, folder)
    job, profile = asked.completed(folder), asked.profile
    launcher, now = launcher_choice.choose(asked._replace(spec=job), template), asked.now()
    software_checks.check(job, launcher, asked.backend, asked.sources)
    kinds = now.kinds_for(job, asked.gpus, job.gpu_type or profile.cluster.gpu_type)
    request = gpu_request.of(job, profile.cluster, asked.gpus, kinds)
    cpus = rank_cpus.of(asked, kinds, now.cpu_limit(job))
    fit = job_fit.of(asked, now, request, kinds, cpus, environ)
    disks = local_disks.check(job, folder, runs, kinds, fit.facts, environ) if runs else []
    avoided = left_out.of(asked, kinds, now.site.cluster, environ) if now.site else []
    code = _code(job, folder, runs) if runs else None  # last, since it may take long
    return Plan(
        spec=job, sources=asked.sources, profile=profile, nodes=asked.nodes, gpus=asked.gpus,
        launcher=launcher, template=template, cpus_per_task=cpus, gpu_request=request,
        notes=(*asked.notes, *filter(None, [request.note]), *fit.notes,
               *(f"leaves out {row}; see `hpcddp nodes`" for row in avoided),
               *notes.notes(job, profile, environ, asked.gpus, runs)),
        workdir=folder, warnings=tuple(disks), site=now.site, measured=measured, code=code,
        slurm_missing=asked.slurm_missing, left_out=tuple(avoided), memory=fit.memory_mb,
        imported=fit.imported(job.software), origin=asked.origin, allocated=asked.allocated,
    )  # fmt: skip


def _code(job: JobSpec, folder: Path, runs: Path) -> CodeFiles | None:
    """The checked files of the code snapshot; None if the job works in the folder itself."""
    if not (job.command and job.snapshot):
        return None
    from hpcddp.planning.project import code_checks

    return code_checks.checked(job, folder, runs)


def _env_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
