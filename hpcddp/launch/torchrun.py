"""The launcher `torchrun`: torch's own agent on each node, which starts and watches its ranks.

    python -P -m hpcddp.launch.torchrun RANKS_PER_NODE COMMAND...

Started once on each node, by srun or by spawn.py. The nodes meet at the store of the first one,
by their numbers and not by their names, so ranks are those of the map. What the program `torchrun`
does otherwise: it ends the ranks when it gets TERM, dies of USR2, and leaves with 1 whatever they
left with. Here they get the signal and are waited for, and the first bad exit code is the node's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpcddp.attempt.error_record import host
from hpcddp.attempt.joblog import rank_ended
from hpcddp.preempt import ignore_stop_signals, stop_signals
from hpcddp.processes import children
from hpcddp.topology import Rank

START = 600  # seconds in which all nodes must be there


def main(args: list[str]) -> int:
    """Start this node's ranks, and see to them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for number in stop_signals():  # until now nothing has begun: it ends this process
                signal.signal(number, pass_on)
            return super().reify(envs)

    ranks, *command = args
    node = Rank.from_env(os.environ)
    logs = Path(os.environ["HPCDDP_RUN_DIR"], "attempts", os.environ["HPCDDP_ATTEMPT"], "torchrun")
    config = LaunchConfig(
        min_nodes=node.world_size,
        max_nodes=node.world_size,
        nproc_per_node=int(ranks),
        run_id=Path(os.environ["HPCDDP_RUN_DIR"]).name,
        rdzv_backend="static",
        rdzv_endpoint=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rdzv_configs={"rank": node.world_rank, "timeout": START},
        max_restarts=0,  # a job comes back as a whole, from its batch script
        logs_specs=Logs(log_dir=str(logs / str(node.world_rank)), tee=Std.ALL),
        log_line_prefix_template="${rank}: ",
        signals_to_handle="SIGINT,SIGHUP",
    )
    logging.disable(logging.ERROR)  # a rank that saved and left is no error
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return exit_code(rank, failure.exitcode)
    finally:
        ignore_stop_signals()  # one that comes while Python leaves would hide the exit code
    return 0


def exit_code(rank: int, code: int) -> int:
    """A rank's bad exit code, as a shell has it. Of a signal its name is printed."""
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    print(rank_ended(rank, host(), name), flush=True)
    return 128 - code


def pass_on(number: int, frame: FrameType | None) -> None:
    """Tell the ranks."""
    for pid in children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
