"""What a server's request log says, record by record."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE_S = 60


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._records: queue.Queue[logging.LogRecord] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._records.put(record)

    def next(self) -> tuple[str, str, dict[str, Any]]:
        """Level, line and fields. A line is written after its client has all of the answer."""
        record = self._records.get(timeout=PATIENCE_S)
        return record.levelname, record.getMessage(), record.__dict__["fields"]

    def is_empty(self) -> bool:
        return self._records.empty()


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger = logging.getLogger("kvstrata.requests")
    handler, level = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
