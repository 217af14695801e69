"""Display of the stages of a start: one live line on a terminal, else a log line for each stage.

Listens to the stages that `platform/logging.py` logs. Knows how stages are shown, not which ones there are.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from kvstrata.platform.logging import STAGES_LOGGER

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

logger = logging.getLogger("kvstrata.serve")

REFRESH_HZ = 8
LEAST_SHOWN_S = 0.05


class Starting(logging.Handler):
    """Log handler that shows stages, as a context manager; `end` ends it early. Silent afterwards."""

    def __init__(self, *, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`live` redraws a single line, which needs a terminal."""
        super().__init__(logging.INFO)
        self._clock = clock
        self._began = self._stage_began = clock()
        self._stage, self._doing = "", "Starting"
        self.seconds: dict[str, float] = {}  # of each finished stage
        self._live = _line(self._drawn) if live else None
        self._source = logging.getLogger(STAGES_LOGGER)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def __enter__(self) -> Starting:
        self._source.handlers = [self]
        self._source.propagate = False
        self._source.setLevel(logging.INFO)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def emit(self, record: logging.LogRecord) -> None:
        """Begin a stage and end the one before. May be called on any thread; stages follow each other."""
        self._end_stage()
        self._stage, self._doing = getattr(record, "stage", ""), record.getMessage()
        if self._live is None:
            told = {"stage": self._stage, "elapsed_s": round(self.elapsed_s, 3)}
            logger.info("start: %s (after %.1f s)", self._doing, self.elapsed_s, extra={"fields": told})

    def end(self) -> None:
        if self not in self._source.handlers:
            return
        self._end_stage()
        self._source.handlers = []
        if self._live is not None:
            self._live.stop()

    def words(self) -> str:
        """Return the total time of the start and the time of each stage."""
        parts = [f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items() if seconds >= LEAST_SHOWN_S]
        return f"ready after {sum(self.seconds.values()):.1f} s: {', '.join(parts)}"

    def _end_stage(self) -> None:
        now = self._clock()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._stage_began
        self._stage, self._stage_began = "", now

    def _drawn(self) -> Text:
        from rich.text import Text

        text = Text(f"{self._doing} ", no_wrap=True, overflow="ellipsis")
        return text.append(f"{self._clock() - self._stage_began:.0f} s, {self.elapsed_s:.0f} s in all", style="dim")


def is_terminal() -> bool:
    return sys.stderr.isatty()


def _line(drawn: Callable[[], Text]) -> Live:
    from rich.console import Console
    from rich.live import Live

    # Erased at the end: the final message has the times.
    return Live(get_renderable=drawn, console=Console(stderr=True), refresh_per_second=REFRESH_HZ, transient=True)
