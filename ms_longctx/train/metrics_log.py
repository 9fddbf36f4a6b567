# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run: one JSON line a record, and TensorBoard events where tensorboard is installed."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from ms_longctx.train.checkpoint import write_text

METRICS_FILE = "metrics.jsonl"
EVENTS_DIRECTORY = "tensorboard"

logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends records to ``metrics.jsonl`` and to TensorBoard's event files.

    A resumed run repeats the steps after its checkpoint, so their old lines are removed from the JSON file,
    and TensorBoard is told to hide its old events: no step appears twice.

    Args:
        output_dir: directory of the run; it must exist.
        resumed_step: optimizer steps that the checkpoint holds; 0 starts an empty log.
    """

    def __init__(self, output_dir: Path, resumed_step: int = 0):
        self.path = output_dir / METRICS_FILE
        kept = [record for record in read_metrics(self.path) if record["step"] <= resumed_step]
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = open(self.path, "a", encoding="utf-8")
        self._events = _open_events(output_dir / EVENTS_DIRECTORY, resumed_step)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record.

        Args:
            record: ``step`` and any numbers or texts. Numbers also become TensorBoard scalars of that name.
        """
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._events is not None:
            self._events.write(record)

    def close(self) -> None:
        """Flush and close both files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete records of a metrics log; a line that a killed process left half written is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            logger.warning("%s: left out an incomplete line: %.60r", path, line)
    return records


class _TensorBoardEvents:
    """Scalars in TensorBoard's format, written by tensorboard's own event writer."""

    def __init__(self, directory: Path, resumed_step: int):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = EventFileWriter(str(directory))
        # A session that starts at step n makes TensorBoard drop the events of older files from step n on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(resumed_step + 1, session_log=start)

    def write(self, record: dict[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name not in ("step", "time") and isinstance(value, (int, float))
        ]
        self._add(record["step"], summary=self._summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **payload: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **payload))


def _open_events(directory: Path, resumed_step: int) -> _TensorBoardEvents | None:
    try:
        return _TensorBoardEvents(directory, resumed_step)
    except ImportError:
        logger.warning(
            "tensorboard is not installed, so no TensorBoard events are written; metrics are in %s. "
            "pip install 'ms_longctx[monitor]' brings it",
            METRICS_FILE,
        )
        return None
