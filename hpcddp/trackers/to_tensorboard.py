"""TensorBoard: event files in RUN/tensorboard, written without torch or TensorFlow.

A repeated step is written again. An event before it invalidates the earlier values from this step
on (SessionLog.START, as written for purge_step by other writers).
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hpcddp.rundir import RunDir
from hpcddp.trackers.send import config


def knows(run: RunDir, memory: Mapping[str, Any]) -> bool:
    """Whether the folder of the event files still exists."""
    return run.tensorboard.is_dir()


def open_sink(run: RunDir, memory: Mapping[str, Any]) -> EventFiles:
    """Make a new file beside the existing ones."""
    run.tensorboard.mkdir(exist_ok=True)
    # Files are read in the order of their names, which start with the time in whole seconds.
    while list(run.tensorboard.glob(f"events.out.tfevents.{int(clock.time()):010d}.*")):
        clock.sleep(0.1)
    return EventFiles(run, first="told" not in memory)


class EventFiles:
    """The event file of a run that this process writes."""

    def __init__(self, run: RunDir, *, first: bool) -> None:
        self.memory: dict[str, Any] = {}
        self._writer = EventFileWriter(str(run.tensorboard))
        self.place = str(run.tensorboard)
        self._step = -1.0 if first else math.inf  # the newest step; inf if unknown
        if first:
            rows = [f"| {name} | {value} |" for name, value in config(run).items()]
            self._text("config", "\n".join(["| key | value |", "|---|---|", *rows]))

    def put(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Write one event with all values of the step."""
        if step <= self._step:
            mark = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time, step=step, session_log=mark))
        self._step = step
        scalars = [Summary.Value(tag=name, simple_value=x) for name, x in values.items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=scalars)))

    def say(self, text: str) -> None:
        """Write the text `attempts`."""
        self._text("attempts", text.replace("\n", "\n\n"))

    def _text(self, tag: str, text: str) -> None:
        value = Summary.Value(
            tag=f"{tag}/text_summary",
            metadata=create_summary_metadata(display_name=tag, description=""),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        step = int(self._step) if 0 < self._step < math.inf else 0
        event = Event(wall_time=clock.time(), step=step, summary=Summary(value=[value]))
        self._writer.add_event(event)

    def flush(self) -> bool:
        """Write to the file."""
        self._writer.flush()
        return True

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
