"""Why a job waits, as a sentence with what to change, for each reason that Slurm gives.

The names are those of job_state_reason_string in Slurm's own library; a test reads them from the
libraries of several releases. The limits of accounts and QOS have names made of parts, such as
AssocGrpCPUMinutesLimit; a pattern reads them.
"""

from __future__ import annotations

import re

LATER = "wait"
FEWER = "ask for less, or wait"
# Name of a reason -> its meaning, and what to do; {id} is the job's.
REASONS: dict[str, tuple[str, str]] = {
    "AccountNotAllowed": ("the account may not use this partition",
                          "use another account (-A) or partition (-p)"),
    "AccountingPolicy": ("a limit of the account is reached", FEWER),
    "AssociationJobLimit": ("the account has reached its number of jobs", LATER),
    "AssociationResourceLimit": ("the account has reached a limit", FEWER),
    "AssociationTimeLimit": ("the account has used up its time", "use another account (-A)"),
    "BadConstraints": ("no node has the requested features or resources",
                       "change --constraint, --gpus or --mem"),
    "BeginTime": ("it starts at a later time; Slurm holds a requeued job for a while", LATER),
    "BlockFreeAction": ("Slurm frees the nodes", LATER),
    "BlockMaxError": ("the nodes have too many errors", "ask your administrators"),
    "BurstBufferOperation": ("an operation of the burst buffer failed", "check its options"),
    "BurstBufferResources": ("the burst buffer is full", LATER),
    "BurstBufferStageIn": ("the burst buffer copies files", LATER),
    "Cleaning": ("its last attempt is being cleaned up", LATER),
    "Constraints": ("no node meets the request now",
                    "wait, or change --constraint, --gpus or --mem"),
    "DeadLine": ("it cannot end before its --deadline", "use a later one"),
    "Dependency": ("it waits for another job (--dependency)", LATER),
    "DependencyNeverSatisfied": ("the job that it depends on ended otherwise",
                                 "cancel it: hpcddp cancel RUN"),
    "FedJobLock": ("the federation of clusters decides where it starts", LATER),
    "FrontEndDown": ("the front end is down", LATER),
    "InactiveLimit": ("it reached the limit for inactive jobs", "submit it again"),
    "InvalidAccount": ("the account is not valid", "use another one (-A)"),
    "InvalidQOS": ("the QOS is not valid", "use another one (-q)"),
    "JobArrayTaskLimit": ("the array has reached its limit of running elements", LATER),
    "JobHeldAdmin": ("held by an administrator, who can release it with scontrol release {id}", ""),
    "JobHeldUser": ("held by you; release it with scontrol release {id}", ""),
    "JobHoldMaxRequeue": ("held by Slurm, as it failed to start too often; release it with "
                          "scontrol release {id}", ""),
    "JobLaunchFailure": ("it failed to start on a node", "see the log"),
    "Licenses": ("licenses are in use", LATER),
    "MaxMemPerLimit": ("more memory than the partition allows", "ask for less --mem"),
    "MaxPowerCapacity": ("the site's power limit is reached", LATER),
    "MaxPoweredUpNodes": ("the site's limit of powered-up nodes is reached", LATER),
    "MpiPortsBusy": ("the ports for MPI on the nodes are in use", LATER),
    "NodeDown": ("a requested node is down", "do without --nodelist, or wait"),
    "NonZeroExitCode": ("its script failed", "see the log"),
    "NvidiaImexChannels": ("the NVIDIA IMEX channels are in use", LATER),
    "OutOfMemory": ("a process ran out of memory", "ask for more --mem"),
    "PartitionConfig": ("the partition can never run it as requested",
                        "use fewer --nodes or --gpus, or another partition (-p)"),
    "PartitionDown": ("the partition starts no jobs now", "wait, or use another one (-p)"),
    "PartitionInactive": ("the partition is closed", "use another one (-p)"),
    "PartitionNodeLimit": ("more or fewer nodes than the partition allows, or too many are down",
                           "change --nodes, or use another partition (-p)"),
    "PartitionTimeLimit": ("longer than the partition allows",
                           "use a shorter --time, or another partition (-p)"),
    "PowerNotAvail": ("not enough power", LATER),
    "PowerReserved": ("power is reserved for other jobs", LATER),
    "Priority": ("jobs of higher priority come first", LATER),
    "Prolog": ("the prolog runs on its nodes", LATER),
    "QOSNotAllowed": ("the QOS may not be used with this account or partition",
                      "use another one (-q)"),
    "QOSUsageThreshold": ("the account's usage is too high for this QOS",
                          "wait, or use another QOS (-q)"),
    "RaisedSignal": ("a signal ended its script", "see the log"),
    "ReqNodeNotAvail": ("requested nodes are down, reserved, or needed for maintenance before it "
                        "would end", "use a shorter --time, or do without --nodelist"),
    "Reservation": ("it waits for its reservation to begin", LATER),
    "ReservationDeleted": ("its reservation is gone", "do without --reservation"),
    "ReservationInvalid": ("held by Slurm, as its reservation is not valid",
                           "use another --reservation, or none"),
    "Resources": ("the nodes that it needs are busy", "wait, or ask for less"),
    "SchedDefer": ("Slurm starts it at its next round", LATER),
    "SystemFailure": ("Slurm failed", "ask your administrators"),
    "TimeLimit": ("it reached its time limit", "ask for more --time"),
    "WaitingForScheduling": ("Slurm has not looked at it yet", LATER),
    # Of releases with other names.
    "QOSJobLimit": ("the QOS has reached its number of jobs", LATER),
    "QOSResourceLimit": ("the QOS has reached a limit", FEWER),
    "QOSTimeLimit": ("longer than the QOS allows", "use a shorter --time, or another QOS (-q)"),
}  # fmt: skip

# A job with one of these starts only when someone changes the job, or the partition.
NEVER = {
    "AccountNotAllowed", "BadConstraints", "InvalidAccount", "InvalidQOS", "MaxMemPerLimit",
    "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "QOSNotAllowed", "QOSTimeLimit",
}  # fmt: skip

# Parts of the names of limits, the longer ones first -> what is limited.
_LIMITED = {
    "CPU|Cpu": "CPUs", "Memory|Mem": "memory", "Node": "nodes", "GRES": "GPUs or other resources",
    "Energy": "energy", "License": "licenses", "BB": "burst buffer", "Billing": "billing units",
    "Unknown": "a resource", "SubmitJobs?": "submitted jobs", "Jobs?": "running jobs",
    "Wall(?:Duration)?": "time",
}  # fmt: skip
_LIMIT = re.compile(
    r"(?P<of>Assoc|QOS)?(?P<kind>Grp|Max|Min)"
    rf"(?P<what>{'|'.join(_LIMITED)})"
    r"(?P<time>RunMinutes|RunMins|Minutes)?(?P<per>Per(?:Job|Node|User|Account))?"
    r"(?:NotSatisfied|Limit)?"
)
# Reasons that are sentences; squeue writes spaces, scontrol underscores. {id} is the job's.
_SENTENCES = (
    ("launch.failed.*held", "held by Slurm, as it failed to start on a node; release it with "
                            "scontrol release {id}"),
    (".*held.*", "held by Slurm; release it with scontrol release {id}"),
    ("Nodes.required.for.job.are.*", "nodes that it needs are down, drained or reserved: wait, or "
                                     "use fewer nodes or another partition (-p)"),
    ("Job.s.(account|QOS|group).*not.permitted.*", "it may not use this partition: use another "
                                                   "account (-A), QOS (-q) or partition (-p)"),
)  # fmt: skip


def never(reason: str) -> bool:
    """Whether a job that waits for this reason never starts as it is."""
    return _name(reason) in NEVER


def _name(reason: str) -> str:
    return re.split(r"[,:(\s]", reason, maxsplit=1)[0]


def sentence(reason: str, job_id: str) -> str:
    """The reason with its meaning and what to do; a reason that is not known as Slurm said it."""
    name = _name(reason)
    known, change = REASONS.get(name, ("", ""))
    if not known and (match := _LIMIT.fullmatch(name)):
        known, change = _limit(match)
    if not known:
        known = next((text for pattern, text in _SENTENCES if re.match(pattern, reason)), "")
    if not known:
        return reason
    text = known.format(id=job_id) + (f": {change}" if change else "")
    return f"{reason}: {text}"


def _limit(match: re.Match[str]) -> tuple[str, str]:
    """The meaning of a limit, and what to do."""
    owner = {"Assoc": "the account", "QOS": "the QOS"}.get(match["of"] or "", "the account")
    other = "-A" if owner == "the account" else "-q"
    what = next(text for part, text in _LIMITED.items() if re.fullmatch(part, match["what"]))
    if match["kind"] == "Min":
        return f"{owner} requires more {what}", "ask for more"
    if match["time"] in ("RunMinutes", "RunMins"):
        whose = {"PerUser": "one user", "PerAccount": "one account"}.get(match["per"] or "", owner)
        text = f"running jobs have reserved the whole budget of {what} and time of {whose}"
        return text, "wait, or use less --time"
    if match["time"] and not match["per"]:
        return f"{owner} has used up its budget of {what}", f"use another one ({other})"
    if what == "time":
        ask = f"use a shorter --time, or another one ({other})"
        each = "one job" if match["per"] else "all jobs together"
        return f"more time than {owner} allows {each}", ask
    if what in ("running jobs", "submitted jobs"):
        return f"{owner} has reached its number of {what}", LATER
    per = {"PerJob": "one job", "PerNode": "one node", "PerUser": "one user",
           "PerAccount": "one account"}.get(match["per"] or "", "all jobs together")  # fmt: skip
    waits = match["per"] not in ("PerJob", "PerNode")  # those never change
    return f"more {what} than {owner} allows {per}", FEWER if waits else "ask for less"
