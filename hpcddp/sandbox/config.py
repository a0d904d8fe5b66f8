"""Sandbox: settings -> the configuration files of munge, Slurm and its accounting."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from hpcddp.errors import UserError

PREEMPT_MODES = ("REQUEUE", "CANCEL", "OFF")
MAX_NODES = 250
# Of all daemons. Other addresses of 127.0.0.0/8 do not work for nodes: Slurm answers to the source
# address of a connection, and on one machine that is always this one.
ADDRESS = "127.0.0.1"
SOCKET_PATH_LIMIT = 107  # bytes that fit into sockaddr_un, without the closing NUL

SLURM_CONF = Template("""\
ClusterName=sandbox
SlurmctldHost=$controller_name($address)
SlurmctldPort=$slurmctld_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$home/munge.sock
StateSaveLocation=$home/state
SlurmctldPidFile=$home/slurmctld.pid
SlurmctldLogFile=$home/log/slurmctld.log
SlurmctldSyslogDebug=quiet
SlurmdSpoolDir=$home/spool/%n
SlurmdPidFile=$home/slurmd-%n.pid
TmpFS=$home/spool/%n
SlurmdLogFile=$home/log/slurmd-%n.log
SlurmdSyslogDebug=quiet
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=$gather
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=$kill_wait
SlurmctldTimeout=20
SlurmdTimeout=20
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
""")
ACCOUNTING = Template("""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$address
AccountingStoragePort=$slurmdbd_port
AccountingStoragePass=$home/munge.sock
""")
# The daemons, and so the jobs, listen only on the address of the host name that they see. A login
# shell must not: its host name may have any address.
DAEMONS_CONF = Template("Include $home/slurm.conf\n")
LISTEN = "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny\n"
GPUS = "GresTypes=gpu\n"
NODES = Template("""\
NodeName=$node_list NodeAddr=$address Port=$slurmd_ports ${hostname_option}\
CPUs=$cpus Sockets=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=64000$gres State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 \
PreemptMode=$preempt_mode GraceTime=$grace MaxTime=UNLIMITED State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=UNLIMITED State=UP
""")
GRES_CONF = Template("NodeName=$node_list Name=gpu File=$home/dev/nvidia$gpu_range\n")
# By default Slurm looks for cgroups in an old place.
CGROUP_CONF = "CgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
SLURMDBD_CONF = Template("""\
DbdHost=$controller_name
DbdAddr=$address
DbdPort=$slurmdbd_port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$home/munge.sock
PidFile=$home/slurmdbd.pid
LogFile=$home/log/slurmdbd.log
DebugLevelSyslog=quiet
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
""")


@dataclass(frozen=True)
class Settings:
    """The options of a sandbox; `extra` has lines of slurm.conf, which replace the others."""

    nodes: int = 4
    gpus: int = 4
    accounting: bool = True
    preempt_mode: str = "REQUEUE"
    grace: int = 5  # seconds between the notice of a preemption and SIGTERM
    kill_wait: int = 5  # seconds between SIGTERM and SIGKILL
    cpus: int = 0  # of a node; 0 for one per GPU, since all nodes share this machine's CPUs
    extra: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"nodes": 1, "gpus": 0, "grace": 0, "kill_wait": 0, "cpus": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                message = f"must be at least {low}, not {getattr(self, name)}"
                raise UserError(message, where=_option(name))
        if self.nodes > MAX_NODES:
            message = f"must be at most {MAX_NODES}, not {self.nodes}"
            raise UserError(message, where=_option("nodes"))
        if self.preempt_mode not in PREEMPT_MODES:
            message = f"must be {', '.join(PREEMPT_MODES)}, not {self.preempt_mode!r}"
            raise UserError(message, where=_option("preempt_mode"))
        for key, value in self.extra.items():
            if not re.fullmatch(r"[A-Za-z]+", key) or not value.isprintable():
                message = f"not a line of slurm.conf: {f'{key}={value}'!r}"
                raise UserError(message, where="--set", hint="write KEY=VALUE, such as KillWait=30")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class SandboxSite:
    """The place of a sandbox on this machine: folder, host, names and ports."""

    home: str  # the folder of the daemons; its path is short and plain
    host: str  # this machine's short name
    prefix: str  # of the node names
    ports: dict[str, int]  # slurmctld, slurmd (the first of them), slurmdbd
    own_hostnames: bool  # nodes and controller have their own host names (UTS namespaces)

    @property
    def controller_name(self) -> str:
        return f"{self.prefix}ctl" if self.own_hostnames else self.host

    @property
    def slurm_conf(self) -> str:
        return f"{self.home}/slurm.conf"

    def node_names(self, count: int) -> list[str]:
        return [f"{self.prefix}{k}" for k in range(1, count + 1)]


def fits(home: Path, prefix: str = "sb99n") -> bool:
    """Whether the daemons can use this folder: Slurm's files have no quotes, and the sockets of job
    steps, `spool/NODE/NODE_JOB.STEP`, must fit into a socket address."""
    node = f"{prefix}{MAX_NODES}"
    longest = f"{home}/spool/{node}/{node}_{2**32 - 1}.{2**32 - 1}"
    plain = re.fullmatch(r"[A-Za-z0-9_./+-]+", str(home)) is not None
    return plain and len(longest) <= SOCKET_PATH_LIMIT


def files(site: SandboxSite, settings: Settings) -> dict[str, str]:
    """Name -> text of every configuration file."""
    facts = _facts(site, settings)
    listen = LISTEN if site.own_hostnames else ""
    texts = {
        "slurm.conf": _slurm_conf(settings, facts),
        "daemons.conf": DAEMONS_CONF.substitute(facts) + listen,
    }
    if settings.gpus:
        texts["gres.conf"] = GRES_CONF.substitute(facts)
    if any("cgroup" in value for value in settings.extra.values()):
        texts["cgroup.conf"] = CGROUP_CONF
    if settings.accounting:
        texts["slurmdbd.conf"] = SLURMDBD_CONF.substitute(facts) + listen
    return texts


def _slurm_conf(settings: Settings, facts: Mapping[str, object]) -> str:
    text = SLURM_CONF.substitute(facts)
    if settings.gpus:
        text += GPUS
    if settings.accounting:
        text += ACCOUNTING.substitute(facts)
    return _override(text, settings.extra) + NODES.substitute(facts)


def _override(text: str, extra: Mapping[str, str]) -> str:
    """The extra lines replace those with the same key: slurm.conf may have each key once."""
    given = {key.lower() for key in extra}
    kept = [line for line in text.splitlines() if line.partition("=")[0].lower() not in given]
    return "\n".join([*kept, *(f"{key}={value}" for key, value in extra.items())]) + "\n"


def _facts(site: SandboxSite, settings: Settings) -> dict[str, object]:
    slurmd = site.ports["slurmd"]
    return {
        "home": site.home,
        "address": ADDRESS,
        "controller_name": site.controller_name,
        "slurmctld_port": site.ports["slurmctld"],
        "slurmdbd_port": site.ports["slurmdbd"],
        "slurmd_ports": f"[{slurmd}-{slurmd + settings.nodes - 1}]",
        "node_list": f"{site.prefix}[1-{settings.nodes}]",
        "hostname_option": "" if site.own_hostnames else f"NodeHostname={site.host} ",
        "gather": "jobacct_gather/linux" if settings.accounting else "jobacct_gather/none",
        "gres": f" Gres=gpu:{settings.gpus}" if settings.gpus else "",
        "gpu_range": f"[0-{settings.gpus - 1}]",
        "kill_wait": settings.kill_wait,
        "cpus": settings.cpus or max(1, settings.gpus),
        "preempt_mode": settings.preempt_mode,
        "grace": settings.grace,
    }
