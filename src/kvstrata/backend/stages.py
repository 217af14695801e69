"""What a start is busy with. A room says what it begins, through the log; the code that shows it listens there.

So no room has to be handed a way to tell, and without a listener nothing is said.
"""

from __future__ import annotations

import logging

LOGGER = "kvstrata.start"


def begin(stage: str, doing: str) -> None:
    """The stage before it has ended. `stage`: a word or two that its seconds are told under."""
    logging.getLogger(LOGGER).info("%s", doing, extra={"stage": stage})
