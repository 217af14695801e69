"""Log of the process on stderr, and the stages of a start, which are log records too.

Lines for people have uvicorn's format, so that all lines look alike; for programs each line is a JSON object. Text from
a client can neither begin a line nor control a terminal. A record may carry `fields`, which become members of the
object; the message repeats them for people. Without a listener on `STAGES_LOGGER` stages are not shown.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from kvstrata.printable import printable, printable_line

# Control characters that JSON leaves as they are.
BEYOND_ASCII = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
STAGES_LOGGER = "kvstrata.start"


class Stderr(logging.StreamHandler[TextIO]):
    """Handler for the `sys.stderr` of that moment, which a live line on a terminal replaces for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        from uvicorn.logging import DefaultFormatter  # here, because it is slow to import

        super().__init__()
        self._uvicorn = DefaultFormatter("%(levelprefix)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable_line(record.message)
        return self._uvicorn.formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable(super().formatException(ei))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str).translate(BEYOND_ASCII)


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


def begin(stage: str, doing: str) -> None:
    """Log that a stage of the start begins and the one before has ended. `stage`: a word or two for its duration."""
    logging.getLogger(STAGES_LOGGER).info("%s", doing, extra={"stage": stage})
