"""Step 3: Plan = spec + cluster + topology + launcher, all checked; after it input is right.

The user's code is not imported here: only the nodes do that.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcddp import spec, strategy
from hpcddp.attempt import launch_facts
from hpcddp.data import names
from hpcddp.errors import SlurmUnreachable, TemplateError
from hpcddp.keys import nearest
from hpcddp.launch import launchers
from hpcddp.planning import checks, clusters, conflicts, jobfile, resources
from hpcddp.planning.advice import Measured
from hpcddp.planning.clusters import Profile
from hpcddp.planning.jobfile import Layer
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir
from hpcddp.sizes import NodeRange, parse_count, parse_gpus, parse_nodes
from hpcddp.slurm import partitions, sbatch
from hpcddp.slurm import rules as site_rules
from hpcddp.slurm.rules import Site
from hpcddp.spec import JobSpec
from hpcddp.strategy import Layout
from hpcddp.topology import Topology

if TYPE_CHECKING:
    from hpcddp.submit.code_snapshot import Inputs

# Sent before the time limit, up to half a minute too early. The ranks know the limit, and stop as
# late as they can; so it is asked for only where preemption sends it instead of TERM.
SIGNAL = "USR2"
# Where Slurm writes to before the run's folder is known to be there: a file of the node, that the
# attempt joins to the run's own log. %j is the job.
NODE_LOG = "/tmp/hpcddp-{run}-%j.log"
LEAD = 30  # seconds, as long as nobody knows what the job's steps and saves take


@dataclass
class Plan:
    """A checked plan: all that rendering and submitting need."""

    spec: JobSpec
    sources: dict[str, str]
    profile: Profile
    nodes: NodeRange
    gpus: int
    launcher: launchers.Launcher
    template: Path
    cpus_per_task: int
    workdir: Path
    notes: list[str]
    site: Site | None = None  # what Slurm says of itself
    measured: Measured | None = None  # what an earlier run of the job took
    inputs: Inputs | None = None  # what a run's working folder is made of, if it has one

    @property
    def topology(self) -> Topology:
        """The map at its largest."""
        return Topology(self.nodes.max, self.ranks_per_node)

    @property
    def ranks_per_node(self) -> int:
        """How many processes train on a node: one per GPU, or one that drives them all."""
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
        return run.work / self.inputs.below if self.inputs else self.workdir

    @property
    def signal(self) -> str:
        """The signal before the time limit, and how many seconds before; "" for none."""
        if "signal" in self.spec.slurm or not (self.site and self.site.user_signal):
            return str(self.spec.slurm.get("signal", ""))
        return f"{SIGNAL}@{self.measured.lead if self.measured else LEAD}"

    def worker_command(self, run: RunDir) -> list[str]:
        """How a rank starts."""
        return [sys.executable, "-P", "-m", "hpcddp.worker", str(run.path)]

    def record(self, run: RunDir, created: float | None = None) -> JobRecord:
        """job.json: what the nodes and the later commands read."""
        cluster = self.profile.cluster
        return JobRecord(
            run=run.name,
            spec=spec.to_dict(self.spec),
            nodes=[self.nodes.min, self.nodes.max],
            gpus_per_node=self.gpus,
            backend=self.backend,
            workdir=str(self.folder(run)),
            cluster=str(self.profile.path),
            launcher=self.launcher.name,
            launch=launch_facts.to_say(self.launcher.name, self.launcher.facts),
            host_suffix=cluster.host_suffix,
            poll_seconds=cluster.poll_seconds,
            lead=int(self.signal.partition("@")[2] or 0),
            created=time.time() if created is None else created,
        )

    def environment(self) -> dict[str, str]:
        """What the job's processes find in their environment beside the ranks."""
        found = {"OMP_NUM_THREADS": str(self.cpus_per_task), "PYTHONUNBUFFERED": "1"}
        interface = self.profile.cluster.interface or ("lo" if self.backend == "local" else "")
        if interface:
            found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        if "signal" in self.spec.slurm:
            name = str(self.spec.slurm["signal"]).partition("@")[0].removeprefix("SIG")
            found["HPCDDP_SIGNAL"] = name
        return found | {n: _env_text(v) for n, v in self.spec.env.items()}

    def directives(self, run: RunDir) -> list[tuple[str, Any]]:
        """sbatch's options in the order of the script."""
        if re.search("%[jtAa]", str(run.path)):
            raise TemplateError(
                "submitit would put a job's number in place of %j, %t, %A or %a",
                where=str(run.path),
                hint="take another folder for the runs: --runs",
            )
        options = dict(self.spec.slurm)
        for name in ("requeue", "no-requeue", "cpus-per-task"):
            options.pop(name, None)
        cluster = self.profile.cluster
        gpus = f"{cluster.gpu_type}:{self.gpus}" if cluster.gpu_type else str(self.gpus)
        rows: list[tuple[str, Any]] = [
            ("job-name", run.name),
            ("nodes", self.nodes),
            ("ntasks-per-node", self.ranks_per_node),
            ("cpus-per-task", self.cpus_per_task),
            ("chdir", self.folder(run)),
            *([] if "output" in options else [("output", NODE_LOG.format(run=run.name))]),
            ("open-mode", "append"),
            ("requeue" if self.spec.requeue.enabled else "no-requeue", True),
        ]
        if cluster.gpu_option != "none":
            asked = gpus if cluster.gpu_option == "gpus-per-node" else f"gpu:{gpus}"
            others = [str(options.pop("gres"))] if cluster.gpu_option in options else []
            rows.insert(3, (cluster.gpu_option, ",".join([asked, *others])))
        if self.signal:
            options["signal"] = self.signal
        return rows + sorted(options.items())

    def render(self, run: RunDir, command: list[str]) -> str:
        """The script that starts `command` once per rank."""
        from hpcddp.planning.render import TemplateContext, render

        modules, trackers = self.profile.cluster.modules, self.spec.metrics.trackers
        variables: dict[str, Any] = {
            "RUN": str(run.path),
            "WORKDIR": str(self.folder(run)),
            "PYTHON": sys.executable,
            "NODES": str(self.nodes.max),
            "GPUS_PER_NODE": self.ranks_per_node,  # what a launcher starts there
            "CPUS_PER_TASK": self.cpus_per_task,
            **({"MODULES": modules} if modules else {}),
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
            modules=bool(modules),
            program=bool(self.spec.command),
            trackers=bool(trackers),
            backend=self.backend,
            returns=self.spec.requeue.enabled,
        )
        return render(self.template, resources.folder("templates"), facts)


class Asked(NamedTuple):
    """What was asked, value by value; what the values mean together is not checked yet."""

    spec: JobSpec
    sources: dict[str, str]
    profile: Profile
    nodes: NodeRange
    gpus: int


def read(layers: list[Layer], notes: list[str], environ: Mapping[str, str]) -> Asked:
    """What layers of values ask for, the highest precedence first; the cluster's come below."""
    asked, _ = jobfile.merge(layers)
    profile = clusters.load(_backend(asked.cluster, notes), environ)
    job, sources = jobfile.merge([*layers, profile.layer()])
    sources.setdefault("nodes", "default")
    sources.setdefault("gpus", "default")
    job.cluster = profile.name if asked.cluster in ("auto", profile.name) else str(profile.path)
    nodes = parse_nodes(job.nodes, where=sources["nodes"])
    return Asked(job, sources, profile, nodes, parse_gpus(job.gpus, where=sources["gpus"]))


def make(
    layers: list[Layer],
    notes: list[str],
    *,
    environ: Mapping[str, str],
    folder: Path,
    begun: bool = False,
) -> Plan:
    """The plan from layers of values, or the first error that a user can mend.

    Args:
        layers: job values, as for `read`.
        environ: the user's environment.
        folder: the current folder, where the job will work.
        begun: the run has saved a checkpoint; what only a new one reads may be gone.
    """
    job, sources, profile, nodes, gpus = read(layers, notes, environ)
    checks.name(job, sources)
    if job.command:
        checks.command(job, sources, profile, folder)
    else:
        checks.batch(job, nodes, gpus, sources)
        conflicts.check(job, strategy.layout(job.strategy, nodes.max, gpus), sources)
    if job.start_from:
        job.start_from = str(folder / job.start_from)
        checks.weights(job, sources, begun=begun)
    checks.data(job, sources)
    job.data.stage = names.placed(job.data.stage, folder)
    absent = names.absent(job.data.stage)
    notes += [f"data.stage: {path} is not here; the nodes must have it" for path in absent]
    checks.environment(job, sources, profile)
    checks.options(job, sources)
    if job.slurm.get("no-requeue") or job.slurm.get("requeue") is False:
        job.requeue.enabled = False
    checks.limits(job, nodes, gpus, profile)
    if profile.cluster.backend == "slurm":
        checks.variables(environ)
    notes += [*checks.patience(job), *checks.trackers(job), *checks.output(job, profile, environ)]
    launcher = launchers.find(job.launcher, profile.cluster.backend, sources.get("launcher", ""))
    checks.served(job, launcher, profile)
    rules = site_of(job, profile)
    return Plan(
        job, sources, profile, nodes, gpus, launcher, _template(job, profile, sources, folder),
        _cpus(job, profile, nodes, gpus, sources, rules), folder, notes, rules,
    )  # fmt: skip


def _backend(cluster: str, notes: list[str]) -> str:
    """`auto` is Slurm where sbatch answers, and this machine elsewhere."""
    if cluster != "auto":
        return cluster
    if sbatch.answers():
        return "slurm"
    notes.append("sbatch does not answer here: running on this machine")
    return "local"


def site_of(job: JobSpec, profile: Profile) -> Site | None:
    """What Slurm says of itself and of the job's partition."""
    if profile.cluster.backend != "slurm":
        return None
    try:
        return site_rules.read(str(job.slurm.get("partition", "")).partition(",")[0])
    except SlurmUnreachable:
        return None


def _env_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _template(job: JobSpec, profile: Profile, sources: Mapping[str, str], folder: Path) -> Path:
    """The template's file: a profile's beside it or shipped, a user's from the current folder."""
    ours = resources.folder("templates")
    name = job.template or f"{profile.cluster.backend}.sh.j2"
    source = sources.get("template", "")
    bases = [profile.path.parent] if source == str(profile.path) else [folder] if source else []
    known = [f"{backend}.sh.j2" for backend in ("slurm", "local")]
    for base in (*bases, *([ours] if name in known else [])):
        with contextlib.suppress(OSError):  # a name too long for a file
            if (base / name).is_file():
                return base / name
    raise TemplateError(f"unknown template {name!r}", where=source or "template",
                        hint=nearest(name, known, what="template"))  # fmt: skip


def _cpus(
    job: JobSpec, profile: Profile, nodes: NodeRange, gpus: int, sources: Mapping[str, str],
    rules: Site | None,
) -> int:  # fmt: skip
    """CPUs of one rank: as asked, or those of its GPUs."""
    ranks = strategy.processes(job.strategy, gpus)
    if profile.cluster.backend == "local":
        return max(1, len(os.sched_getaffinity(0)) // (nodes.max * ranks))
    if (asked := job.slurm.get("cpus-per-task")) is not None:
        return parse_count(asked, "CPUs per task", where=sources["slurm.cpus-per-task"])
    return gpus // ranks * (profile.cluster.cpus_per_gpu or _share(job, gpus, rules))


def _share(job: JobSpec, gpus: int, rules: Site | None) -> int:
    """CPUs of one GPU: an even share of what the partition's smallest node has."""
    if rules is None:  # nobody answers
        return 1
    try:
        rows = partitions.read()
    except SlurmUnreachable:
        return 1
    wanted = str(job.slurm.get("partition", "")).split(",")[0]
    mine = [r for r in rows if r.name == wanted or (not wanted and r.default)]
    return max(1, min((r.cpus // max(r.gpus, gpus) for r in mine), default=1))
