"""Writes event files for TensorBoard with the tensorboard package. Does not need TensorFlow."""

# pyright: reportAttributeAccessIssue=false
# The protobuf classes of tensorboard have no type information.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_workers.trackers.types import COLUMNS, Facts, LibraryMissing, Record


class TensorBoard:
    """Writes metrics as scalars under their names, and ``completions`` and ``config`` as text."""

    name = "tensorboard"

    def __init__(self, facts: Facts, folder: Path) -> None:
        """folder: the run's folder for event files."""
        self._facts, self._folder = facts, folder
        self._writer: Any = None
        self._last: dict[str, int] = {}  # tag -> newest written step

    def open(self) -> str:
        try:
            from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            fix = "install `rollout-workers[tensorboard]` into the workers' environment"
            raise LibraryMissing(f"the package tensorboard can't be imported: {error}", fix=fix) from error
        self._folder.mkdir(parents=True, exist_ok=True)
        self._last = {}
        for path in sorted(self._folder.glob("events.out.tfevents.*")):
            for event in EventFileLoader(str(path)).Load():  # a truncated file yields its complete events
                for value in event.summary.value:
                    self._last[value.tag] = max(event.step, self._last.get(value.tag, -1))
        self._writer = EventFileWriter(str(self._folder), max_queue_size=64, flush_secs=5)
        if "config" not in self._last:
            self._add(0, 0.0, [_text("config", "```json\n" + json.dumps(self._facts.config, indent=2) + "\n```")])
        return str(self._folder)

    def write(self, record: Record) -> bool:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if record.kind == "completions":
            values = [_text("completions", _markdown(record.rows))]
        else:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(record.metrics.items())]
        return self._add(record.step, record.seconds, values)

    def close(self, state: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, seconds: float, values: list[Any]) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        fresh = [value for value in values if step > self._last.get(value.tag, -1)]
        if not fresh:
            return False
        self._writer.add_event(Event(wall_time=seconds, step=step, summary=Summary(value=fresh)))
        self._writer.flush()
        self._last |= {value.tag: step for value in fresh}
        return True


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

    plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
    tensor = TensorProto(
        dtype="DT_STRING",  # pyright: ignore[reportArgumentType]
        string_val=[text.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _markdown(rows: Any) -> str:
    def cell(value: Any) -> str:
        return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ⏎ ")

    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)])
