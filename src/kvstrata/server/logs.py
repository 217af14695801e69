"""Where the process's own messages go: to stderr, for people in uvicorn's format, so that all lines look alike, or for
programs as JSON, an object on each line. What a client sent can neither begin a line nor steer a terminal.

A record may carry `fields`: they are in the object, and the message has said them to people.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from uvicorn.logging import DefaultFormatter

from kvstrata.printable import printable, printable_line

# Control characters that JSON leaves as they are.
BEYOND_ASCII = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


class Stderr(logging.StreamHandler[TextIO]):
    """Writes to whatever stderr is at that moment: a live line on a terminal takes its place for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


class TextFormatter(DefaultFormatter):
    def __init__(self) -> None:
        super().__init__("%(levelprefix)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable(super().formatException(ei))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str).translate(BEYOND_ASCII)


def show_messages(level: str, form: str = "text") -> None:
    """Show the log of kvstrata and uvicorn from this level on, in a process of our own: other handlers get nothing."""
    handler = Stderr()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("kvstrata", "uvicorn"):
        ours = logging.getLogger(name)
        ours.setLevel(level.upper())
        ours.handlers = [handler]
        # Some library may give the root logger a handler; then every line would come twice.
        ours.propagate = False
