"""Pins that requests ask for themselves: foreseen when a request begins, made when it ends.

Knows requests and pins; does not know which field of which API asked.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvstrata.engine.request import Pinned, Request
from kvstrata.engine.sequence import Sequence
from kvstrata.store.pins import Pins, Term
from kvstrata.store.shelf import Shelf

OVER_QUOTA = "quota"
# Of a request without a session, that name its pin: chats that begin alike share one, so that there are never more
# pins than kinds of chats.
NAMING_TOKENS = 64


class Pinning:
    def __init__(self, pins: Pins, shelf: Shelf, token_bytes: int) -> None:
        self._pins = pins
        self._shelf = shelf
        self._token_bytes = token_bytes

    def foresee(self, sequence: Sequence) -> None:
        """Before the client hears of the request: whether its quota will do, as far as that can be known."""
        request = sequence.request
        if request.pin is None:
            return
        asked = request.prompt[: request.pin.num_tokens]
        if not self._pins.may_keep(asked, request.salt, self._term(request, request.pin), self._token_bytes):
            sequence.unpinned = OVER_QUOTA

    def pin(self, sequence: Sequence) -> None:
        """It has ended; what it computed is stored."""
        request = sequence.request
        if request.pin is None or sequence.unpinned or sequence.num_computed < len(request.prompt) - 1:
            return
        self._pins.keep(request.prompt[: request.pin.num_tokens], request.salt, self._term(request, request.pin))

    def _term(self, request: Request, pin: Pinned) -> Term:
        return Term(_name(request), pin.ttl_s, pin.quota.of(self._shelf.max_bytes))


def _name(request: Request) -> str:
    if request.session:
        return f"session {request.session}"
    first = np.array(request.prompt[:NAMING_TOKENS], np.int32)
    return f"begins {hashlib.sha256(first.tobytes()).hexdigest()}"
