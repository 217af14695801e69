"""The ways to hold a sequence while it runs: as it was computed, or encoded but for its newest tokens. Pure.

Which of them there are follows from the settings: what a request may grow to is what its lowest one allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.segments import GROUP_TOKENS
from kvstrata.engine.storage import Storage
from kvstrata.errors import ConfigError
from kvstrata.layers.buffers import round_up
from kvstrata.layers.kinds import Layout
from kvstrata.spans.plan import Plan, make_plan
from kvstrata.store.precision.ladder import RUNGS


@dataclass(frozen=True)
class Rung:
    plan: Plan | None = None  # what it is encoded to; None: nothing is
    token_bytes: float = 0.0  # of a token that is encoded
    raw_tokens: int | None = None  # most that are raw at once; None: all
    from_tokens: int = 0  # shorter sequences are not held so


RAW = Rung()


def make_rungs(layout: Layout, storage: Storage, chunk_tokens: int) -> tuple[Rung, ...]:
    """Those that the settings allow, the most exact first."""
    target = _rung(layout, storage, storage.k, storage.v, chunk_tokens)
    found = [target if storage.live else RAW]
    if storage.dynamic:
        bits = [(k, v) for k, v in product(RUNGS, RUNGS) if k >= storage.floor_k_bits and v >= storage.floor_v_bits]
        # Values step down before keys.
        steps = [(k, v) for k, v in bits if k in (v, 2 * v)]
        found += [_rung(layout, storage, PlanesCodec(k), PlanesCodec(v), chunk_tokens) for k, v in steps]
    for tokens, codec in storage.dynamic_at:
        found.append(_rung(layout, storage, codec, codec, chunk_tokens, from_tokens=tokens))
    highest = layout.token_bytes if found[0] is RAW or found[0] is None else found[0].token_bytes
    lower = [rung for rung in found[1:] if rung is not None and rung is not RAW and rung.token_bytes < highest]
    return (found[0] or RAW, *sorted(lower, key=lambda rung: -rung.token_bytes))


def live_rungs(layout: Layout, storage: Storage, chunk_tokens: int) -> dict[int, Rung]:
    """What `--kv-cache-live` would come to, by bits."""
    rungs = {bits: _rung(layout, storage, PlanesCodec(bits), PlanesCodec(bits), chunk_tokens) for bits in RUNGS}
    return {bits: rung for bits, rung in rungs.items() if rung is not None and rung is not RAW}


def _rung(layout: Layout, storage: Storage, k: Codec, v: Codec, chunk_tokens: int, from_tokens: int = 0) -> Rung | None:
    """None: this model's layers cannot be stored so."""
    try:
        plan = make_plan(layout, k, v, edge_layers=storage.edge_layers, edge=storage.edge)
    except ConfigError:
        return None
    if plan.is_raw or not layout.token_bytes:
        return RAW
    raw_tokens = storage.first_raw_tokens + storage.recent_raw_tokens + GROUP_TOKENS + chunk_tokens
    # Recurrent states and layers that only mlx-lm knows stay as they are.
    token_bytes = min(plan.token_bytes(layout), float(layout.token_bytes))
    return Rung(plan, token_bytes, round_up(raw_tokens), from_tokens)


class Plans:
    """The plans that this model's layers may be stored under, and the rungs that follow from them."""

    def __init__(self, layout: Layout, storage: Storage, chunk_tokens: int) -> None:
        self._layout = layout
        self._storage = storage
        self._chunk_tokens = chunk_tokens
        # From a K and a V precision. Raises ConfigError for one that the layers cannot be stored in.
        self.plan_of = cache(partial(make_plan, layout, edge_layers=storage.edge_layers, edge=storage.edge))

    def rungs(self, target: Plan) -> tuple[tuple[Rung, ...], dict[int, Rung]]:
        """Those that there are where new spans are stored so, and those of other settings. Of a model that brings
        caches of its own kind none is ever encoded."""
        if any(spec.kind == "foreign" for spec in self._layout.flat()):
            return (RAW,), {}
        now = replace(self._storage, k=target.k, v=target.v)
        return make_rungs(self._layout, now, self._chunk_tokens), live_rungs(self._layout, now, self._chunk_tokens)
