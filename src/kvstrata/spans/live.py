"""Spans whose owner still runs: what they hold are its own tokens, which are encoded meanwhile if that is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from kvstrata.layers.kinds import Layout
from kvstrata.layers.own import OwnTokens
from kvstrata.layers.raw_window import RawWindow
from kvstrata.layers.sequence import Pair, SequenceCache
from kvstrata.layers.tail import FullLayer
from kvstrata.spans.convert import live_pair, lowered, stays
from kvstrata.spans.span import Held, Span

# A running sequence is encoded again when so many tokens have come since.
SEAL_TOKENS = 256


def live_span(layout: Layout, cache: SequenceCache) -> Span:
    """What a sequence computes itself, nothing of it sealed yet."""
    held: dict[int, Held] = {i: layer.own for i, layer in enumerate(cache.flat) if isinstance(layer, FullLayer)}
    return Span(layout, cache.start, 0, held)


def live_bytes(span: Span) -> int:
    """Of its owner: buffers, and what is encoded of them."""
    return sum(own.nbytes for own in _own_tokens(span))


def written_end(span: Span) -> int:
    """Where the owner of a live span is; of others, their end."""
    return next((own.end for own in _own_tokens(span)), span.end)


def sealable_tokens(span: Span, window: RawWindow) -> int:
    """How many of a live span are encoded, or could be."""
    for own in _own_tokens(span):
        count = own.num_to_seal(window)
        return own.sealed_tokens + (count if count >= SEAL_TOKENS else 0)
    return 0


def has_to_seal(span: Span, layer: int, pair: Pair, window: RawWindow) -> bool:
    """Whether a live layer has enough to be encoded, or sealed tokens in more bits than the pair has."""
    own, dtype = span.held(layer), span.layout.flat()[layer].dtype
    if not isinstance(own, OwnTokens):
        return False
    return own.num_to_seal(window) >= SEAL_TOKENS or any(
        not stays(part, live_pair(part, pair), dtype) for part in own.sealed
    )


def sealing(span: Span, layer: int, pair: Pair, window: RawWindow, *, up_to: int) -> Iterator[None]:
    """Encode what the owner of a live layer had written when it was at `up_to`, but for the window; in small steps."""
    own, dtype = span.held(layer), span.layout.flat()[layer].dtype
    if not isinstance(own, OwnTokens):
        return
    for part in own.sealed:
        wanted = live_pair(part, pair)
        if not stays(part, wanted, dtype):
            own.replace_sealed(part, lowered(part, wanted, dtype))
            yield
    since = RawWindow(window.first_tokens, window.recent_tokens + max(0, own.end - up_to))
    if own.num_to_seal(since) >= SEAL_TOKENS:
        yield from own.sealing(*pair, since)


def _own_tokens(span: Span) -> Iterator[OwnTokens]:
    for layer in span.layers:
        held = span.held(layer)
        if isinstance(held, OwnTokens):
            yield held
