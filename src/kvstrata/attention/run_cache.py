"""Cached `Run`s of the parts that a layer reads and does not write: made once for each part."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.segments import RawSegment, Segment


class RunCache:
    def __init__(self) -> None:
        self._known: dict[Segment, cpu_step.TokenRun | None] = {}

    def covers(self, parts: Sequence[Segment]) -> bool:
        return all(run is not None for run in self._look_up(parts))

    def of(self, parts: Sequence[Segment]) -> list[cpu_step.TokenRun]:
        return [run for run in self._look_up(parts) if run is not None]

    def keep_only(self, parts: Sequence[Segment]) -> None:
        self._known = {part: self._known[part] for part in parts if part in self._known}

    def _look_up(self, parts: Sequence[Segment]) -> list[cpu_step.TokenRun | None]:
        runs = [self._known[part] if part in self._known else cpu_step.run_of(part) for part in parts]
        # Earlier parts are dropped. A raw part is looked up each time: its owner still writes and may move the buffer.
        self._known = {part: run for part, run in zip(parts, runs, strict=True) if not isinstance(part, RawSegment)}
        return runs
