"""The launcher `torchrun`: torch's elastic agent on each node, which starts and watches its ranks.

    python -P -m hpcddp.launch.torchrun RANKS_PER_NODE COMMAND...

srun or spawn.py starts it once per node. The agents use the store of the first node, and node
numbers instead of names, so ranks are those of the rank map. The program `torchrun` differs: TERM
makes it end the ranks, USR2 ends it, and its exit code is always 1 after a failure. Here the ranks
get the signal, the agent waits for them, and the first bad exit code is the node's.
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

START = 600  # seconds until all nodes must be there


def main(args: list[str]) -> int:
    """Start this node's ranks, and wait for them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for number in stop_signals():  # before, a signal ends this process
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
        max_restarts=0,  # a job is requeued as a whole, by its batch script
        logs_specs=Logs(log_dir=str(logs / str(node.world_rank)), tee=Std.ALL),
        log_line_prefix_template="${rank}: ",
        signals_to_handle="SIGINT,SIGHUP",
    )
    logging.disable(logging.ERROR)  # a rank that saved and left has not failed
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return exit_code(rank, failure.exitcode)
    finally:
        ignore_stop_signals()  # a signal during Python's exit would change the exit code
    return 0


def exit_code(rank: int, code: int) -> int:
    """A rank's bad exit code, as a shell reports it; prints the name of a signal."""
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    print(rank_ended(rank, host(), name), flush=True)
    return 128 - code


def pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal to the ranks."""
    for pid in children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
