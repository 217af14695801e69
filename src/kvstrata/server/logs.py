"""Where the process's own messages go: to stderr, in uvicorn's format, so that all lines look alike."""

from __future__ import annotations

import logging

from uvicorn.logging import DefaultFormatter


def show_messages(level: str) -> None:
    """Of kvstrata, from this level on. For a process that is ours alone: other handlers do not get them."""
    handler = logging.StreamHandler()
    handler.setFormatter(DefaultFormatter("%(levelprefix)s %(message)s"))
    ours = logging.getLogger("kvstrata")
    ours.setLevel(level.upper())
    ours.handlers = [handler]
    # Some library may give the root logger a handler; then every line would come twice.
    ours.propagate = False
