"""Conversations as they are drawn: what they share once, and each from where it parts from the one that has that.

Pure: takes what the engine told of memory and what is remembered of sessions, and keeps what other tiers told. Knows no
HTTP and asks no engine. A conversation's id is a digest of its salt and tokens, which tells neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from blake3 import blake3

from kvstrata.engine.cache_api import ConversationRun, RememberedConversation, TierRun, TokenIds
from kvstrata.server.sessions.session import num_common

CONTEXT = "kvstrata 2026-11 conversation v1"
ID_CHARS = 32


@dataclass(eq=False)
class Piece:
    """Tokens that are drawn as one: where prompts part, or how they are stored changes, another one begins."""

    salt: str
    start: int
    ids: TokenIds
    stratum: ConversationRun | None  # as memory has them; None: it does not
    session: str
    unused_s: float
    below: list[Piece] = field(default_factory=list)
    on_disk: tuple[TierRun, ...] = ()  # of the prompt from its first token on
    shared_end: int = 0  # of what the shared tier has, likewise

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def disk_end(self) -> int:
        return self.on_disk[-1].end if self.on_disk else 0

    @property
    def is_left_behind(self) -> bool:
        """Its session has gone on elsewhere."""
        return self.stratum is not None and self.stratum.is_superseded

    @property
    def is_held(self) -> bool:
        return self.stratum is not None or max(self.disk_end, self.shared_end) > self.start


@dataclass(frozen=True)
class Part:
    """A run of tokens in one precision, where it is read from first, and which tiers have a copy."""

    tokens: int
    tier: str
    k: str
    v: str
    nbytes: int
    also: tuple[str, ...] = ()
    is_pinned: bool = False

    def goes_on_as(self, other: Part) -> bool:
        mine, others = ((p.tier, p.k, p.v, p.also, p.is_pinned) for p in (self, other))
        return mine == others

    def joined(self, other: Part) -> Part:
        tokens, nbytes = self.tokens + other.tokens, self.nbytes + other.nbytes
        return Part(tokens, self.tier, self.k, self.v, nbytes, self.also, self.is_pinned)


@dataclass(eq=False)
class Row:
    """A conversation, from where it parts from the one above."""

    above: Row | None
    starts_at: int
    pieces: list[Piece] = field(default_factory=list)
    id: str = ""

    @property
    def last(self) -> Piece:
        return self.pieces[-1]

    @property
    def path(self) -> list[Piece]:
        """From its first token on."""
        if self.above is None:
            return self.pieces
        return [piece for piece in self.above.path if piece.end <= self.starts_at] + self.pieces

    def conversation(self) -> RememberedConversation:
        return RememberedConversation(self.last.salt, np.concatenate([piece.ids for piece in self.path]))


class Drawing:
    def __init__(self, told: Sequence[ConversationRun]) -> None:
        self._begin: dict[str, list[Piece]] = {}  # by salt
        pieces: dict[int, Piece] = {}
        for place, stratum in enumerate(told):
            siblings = self._siblings(stratum, pieces)
            if siblings is not None and len(stratum.ids):
                pieces[place] = _piece_of(stratum)
                siblings.append(pieces[place])

    def _siblings(self, stratum: ConversationRun, pieces: dict[int, Piece]) -> list[Piece] | None:
        """None: what it hangs on has changed while it was told. The next look has it again."""
        if stratum.parent is None:
            return None if stratum.start else self._begin.setdefault(stratum.salt, [])
        above = pieces.get(stratum.parent)
        return None if above is None or above.end != stratum.start else above.below

    def add(self, asked: RememberedConversation, session: str, unused_s: float) -> None:
        """A conversation that is remembered: what memory has not of it may be elsewhere. Of a reply the last token is
        never computed."""
        siblings, at = self._begin.setdefault(asked.salt, []), 0
        while at < len(asked.ids) and (piece := _next(siblings, asked.ids[at])) is not None:
            common = num_common(piece.ids, asked.ids[at:])
            at += common
            if common < len(piece.ids):
                if at >= len(asked.ids) - 1:
                    return
                piece = _split(siblings, piece, common)
            siblings = piece.below
        if at < len(asked.ids) - 1:
            siblings.append(Piece(asked.salt, at, asked.ids[at:], None, session, unused_s))

    def rows(self) -> list[Row]:
        """What was used last comes last, below what it shares tokens with."""
        begin = [piece for pieces in self._begin.values() for piece in pieces]
        rows: list[Row] = []
        for piece in sorted(begin, key=_place):
            rows.extend(_rows(piece, Row(None, 0), _hasher(piece.salt)))
        return rows

    def find(self, id: str) -> RememberedConversation | None:
        """What `rows` called so. It may have gone on since: then what it was is still there, and found."""
        for piece, hasher, path in self._ends():
            if hasher.hexdigest()[:ID_CHARS] == id:
                return RememberedConversation(piece.salt, np.concatenate([each.ids for each in path]))
        return None

    def forget_what_is_nowhere(self) -> None:
        for salt, pieces in self._begin.items():
            self._begin[salt] = _held(pieces)

    def _ends(self) -> Iterator[tuple[Piece, blake3, tuple[Piece, ...]]]:
        waiting: list[tuple[Piece, blake3, tuple[Piece, ...]]] = [
            (piece, _hasher(piece.salt), ()) for pieces in self._begin.values() for piece in pieces
        ]
        while waiting:
            piece, hasher, above = waiting.pop()
            hasher.update(piece.ids.tobytes())
            path = (*above, piece)
            yield piece, hasher, path
            waiting.extend((each, hasher.copy(), path) for each in piece.below)


def note_disk(row: Row, runs: tuple[TierRun, ...]) -> None:
    """What the disk has of a conversation."""
    for piece in row.path:
        if runs and runs[-1].end > piece.disk_end:
            piece.on_disk = runs


def note_shared(row: Row, num_tokens: int) -> None:
    """What the shared tier has of a conversation."""
    for piece in row.path:
        piece.shared_end = max(piece.shared_end, num_tokens)


def parts_of(row: Row, shared_precision: str) -> list[Part]:
    """Its own, from where it starts; neighbours that look alike are one."""
    parts: list[Part] = []
    for piece in row.pieces:
        for part in _parts(piece, shared_precision):
            if parts and parts[-1].goes_on_as(part):
                part = parts.pop().joined(part)
            parts.append(part)
    return parts


def _parts(piece: Piece, shared_precision: str) -> Iterator[Part]:
    stratum = piece.stratum
    if stratum is None:
        yield from _elsewhere(piece, shared_precision)
        return
    reaches = {"disk": piece.disk_end, "remote": max(piece.shared_end, stratum.shared_end)}
    ends = {*reaches.values(), *(run.end for run in stratum.precisions)}
    cuts = {piece.start, piece.end, *(end for end in ends if piece.start < end < piece.end)}
    for start, end in pairwise(sorted(cuts)):
        nbytes = stratum.nbytes * (end - start) // max(1, len(stratum.ids))
        also = tuple(tier for tier, reach in reaches.items() if end <= reach)
        run = next(run for run in stratum.precisions if run.end >= end)
        yield Part(end - start, "hot", run.k, run.v, nbytes, also, stratum.is_pinned)


def _elsewhere(piece: Piece, shared_precision: str) -> Iterator[Part]:
    at, run_start = piece.start, 0
    for run in piece.on_disk:
        end = min(run.end, piece.end)
        if end > at:
            nbytes = run.nbytes * (end - at) // max(1, run.end - run_start)
            yield Part(end - at, "disk", run.precision, run.precision, nbytes)
            at = end
        run_start = run.end
    end = min(piece.shared_end, piece.end)
    if end > at:
        yield Part(end - at, "remote", shared_precision, shared_precision, 0)


def _rows(piece: Piece, row: Row, hasher: blake3) -> Iterator[Row]:
    """One for each end below a piece. The one that was used longest ago goes on with `row`; what a session has left
    behind comes last."""
    while True:
        row.pieces.append(piece)
        hasher.update(piece.ids.tobytes())
        if len(piece.below) != 1:
            break
        (piece,) = piece.below
    if not piece.below:
        row.id = hasher.hexdigest()[:ID_CHARS]
        yield row
        return
    first, *others = sorted(piece.below, key=_place)
    yield from _rows(first, row, hasher.copy())
    for other in others:
        yield from _rows(other, Row(row, other.start), hasher.copy())


def _place(piece: Piece) -> tuple[bool, float]:
    """Among those that hang on the same: by what was used last below it."""
    ends, waiting = list[Piece](), [piece]
    while waiting:
        each = waiting.pop()
        ends.extend([] if each.below else [each])
        waiting.extend(each.below)
    return all(end.is_left_behind for end in ends), -min(end.unused_s for end in ends)


def _held(pieces: Iterable[Piece]) -> list[Piece]:
    kept = [piece for piece in pieces if piece.is_held]
    for piece in kept:
        piece.below = _held(piece.below)
    return kept


def _piece_of(stratum: ConversationRun) -> Piece:
    return Piece(stratum.salt, stratum.start, stratum.ids, stratum, stratum.session, stratum.unused_s)


def _split(siblings: list[Piece], piece: Piece, size: int) -> Piece:
    """In two. Returns the upper half, which is the new one."""
    upper = Piece(piece.salt, piece.start, piece.ids[:size], piece.stratum, piece.session, piece.unused_s, [piece])
    siblings[siblings.index(piece)] = upper
    piece.start, piece.ids = piece.start + size, piece.ids[size:]
    return upper


def _next(siblings: Iterable[Piece], token: int) -> Piece | None:
    return next((piece for piece in siblings if piece.ids[0] == token), None)


def _hasher(salt: str) -> blake3:
    hasher = blake3(derive_key_context=CONTEXT)
    # A salt comes from a client's JSON, which may hold half a surrogate pair.
    hasher.update(salt.encode("utf-8", "surrogatepass") + b"\0")
    return hasher
