"""Where the process's own messages go: to stderr, for people in uvicorn's format, so that all lines look alike, or for
programs as JSON, an object on each line.

A record may carry `fields`: they are in the object, and the message has said them to people.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from uvicorn.logging import DefaultFormatter


class Stderr(logging.StreamHandler[TextIO]):
    """Writes to whatever stderr is at that moment: a live line on a terminal takes its place for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


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
        return json.dumps(told, ensure_ascii=False, default=str)


def show_messages(level: str, form: str = "text") -> None:
    """Of kvstrata, from this level on. For a process that is ours alone: other handlers do not get them."""
    handler = Stderr()
    is_json = form == "json"
    handler.setFormatter(JsonFormatter() if is_json else DefaultFormatter("%(levelprefix)s %(message)s"))
    # uvicorn has a way of its own for people.
    for name in ("kvstrata", "uvicorn") if is_json else ("kvstrata",):
        ours = logging.getLogger(name)
        ours.setLevel(level.upper())
        ours.handlers = [handler]
        # Some library may give the root logger a handler; then every line would come twice.
        ours.propagate = False
