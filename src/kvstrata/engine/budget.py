"""KV formats, and what a sequence takes in each. Pure.

A KV format says how a running sequence is held: at full precision, or encoded except for its newest tokens. The
settings decide which formats exist; the lowest one bounds how long a request may grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.segments import GROUP_TOKENS
from kvstrata.engine.config import KvConfig
from kvstrata.errors import ConfigError, NeverFits
from kvstrata.layers.buffers import round_up
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import Pair, SequenceCache
from kvstrata.prefix_cache.ladder import STEP_BITS
from kvstrata.spans.plan import Plan, make_plan, raw_plan


@dataclass(frozen=True)
class KvFormat:
    plan: Plan | None = None  # what it is encoded to; None: nothing is
    token_bytes: float = 0.0  # of a token that is encoded
    raw_tokens: int | None = None  # most that are raw at once; None: all
    from_tokens: int = 0  # shorter sequences are not held so


FULL_PRECISION = KvFormat()


def make_formats(layout: Layout, storage: KvConfig, chunk_tokens: int) -> tuple[KvFormat, ...]:
    """Those that the settings allow, the most exact first."""
    target = _make_format(layout, storage, storage.k, storage.v, chunk_tokens)
    found = [target if storage.live else FULL_PRECISION]
    if storage.dynamic:
        bits = [
            (k, v) for k, v in product(STEP_BITS, STEP_BITS) if k >= storage.floor_k_bits and v >= storage.floor_v_bits
        ]
        # Values step down before keys.
        steps = [(k, v) for k, v in bits if k in (v, 2 * v)]
        found += [_make_format(layout, storage, PlanesCodec(k), PlanesCodec(v), chunk_tokens) for k, v in steps]
    for tokens, codec in storage.dynamic_at:
        found.append(_make_format(layout, storage, codec, codec, chunk_tokens, from_tokens=tokens))
    highest = layout.token_bytes if found[0] is FULL_PRECISION or found[0] is None else found[0].token_bytes
    lower = [
        rung for rung in found[1:] if rung is not None and rung is not FULL_PRECISION and rung.token_bytes < highest
    ]
    return (found[0] or FULL_PRECISION, *sorted(lower, key=lambda rung: -rung.token_bytes))


def live_formats(layout: Layout, storage: KvConfig, chunk_tokens: int) -> dict[int, KvFormat]:
    """What `--kv-cache-live` would come to, by bits."""
    rungs = {
        bits: _make_format(layout, storage, PlanesCodec(bits), PlanesCodec(bits), chunk_tokens) for bits in STEP_BITS
    }
    return {bits: rung for bits, rung in rungs.items() if rung is not None and rung is not FULL_PRECISION}


def _make_format(
    layout: Layout, storage: KvConfig, k: Codec, v: Codec, chunk_tokens: int, from_tokens: int = 0
) -> KvFormat | None:
    """None: this model's layers cannot be stored so."""
    try:
        plan = make_plan(layout, k, v, edge_layers=storage.edge_layers, edge=storage.edge)
    except ConfigError:
        return None
    if plan.is_raw or not layout.token_bytes:
        return FULL_PRECISION
    raw_tokens = storage.first_raw_tokens + storage.recent_raw_tokens + GROUP_TOKENS + chunk_tokens
    # Recurrent states and layers that only mlx-lm knows stay as they are.
    token_bytes = min(plan.token_bytes(layout), float(layout.token_bytes))
    return KvFormat(plan, token_bytes, round_up(raw_tokens), from_tokens)


class FormatCatalog:
    """The plans that this model's layers may be stored under, and the rungs that follow from them."""

    def __init__(self, layout: Layout, storage: KvConfig, chunk_tokens: int) -> None:
        self._layout = layout
        self._storage = storage
        self._chunk_tokens = chunk_tokens
        # From a K and a V precision. Raises ConfigError for one that the layers cannot be stored in.
        self.plan_of = cache(partial(make_plan, layout, edge_layers=storage.edge_layers, edge=storage.edge))

    def formats_for(self, target: Plan) -> tuple[tuple[KvFormat, ...], dict[int, KvFormat]]:
        """Those that there are where new spans are stored so, and those of other settings. Of a model that brings
        caches of its own kind none is ever encoded."""
        if any(spec.kind == "foreign" for spec in self._layout.flat()):
            return (FULL_PRECISION,), {}
        now = replace(self._storage, k=target.k, v=target.v)
        return make_formats(self._layout, now, self._chunk_tokens), live_formats(self._layout, now, self._chunk_tokens)


# What a running server may be told to change to, whatever it was started with: all codecs are read alike.
ANY_CODEC = PlanesCodec(8)


def least_token_bytes(layout: Layout, storage: KvConfig) -> float:
    """What a token takes at the lowest precision that KV gets to by itself."""
    planned = min(plan.token_bytes(layout) for plan in _plans(layout, storage))
    return min(planned, layout.token_bytes) or layout.token_bytes


def sealed_pairs(layout: Layout, storage: KvConfig) -> tuple[Pair, ...] | None:
    """Codecs that stored KV may be read through; None: this model's layers take none."""
    plan = min(_plans(layout, storage), key=lambda plan: plan.token_bytes(layout))
    if not plan.is_raw:
        return plan.pairs
    try:
        plan = make_plan(layout, ANY_CODEC, ANY_CODEC)
    except ConfigError:
        return None
    return None if plan.is_raw else plan.pairs


def _plans(layout: Layout, storage: KvConfig) -> list[Plan]:
    pairs: list[Pair] = [(storage.k, storage.v)]
    if storage.dynamic:
        pairs.append((PlanesCodec(storage.floor_k_bits), PlanesCodec(storage.floor_v_bits)))
    pairs += [(codec, codec) for _, codec in storage.dynamic_at]
    plans = [raw_plan(layout)]
    for k, v in pairs:
        try:
            plans.append(make_plan(layout, k, v, edge_layers=storage.edge_layers, edge=storage.edge))
        except ConfigError:
            # The store says so, with the setting's name.
            continue
    return plans


MIB = 1 << 20


@dataclass(frozen=True)
class Budget:
    total_bytes: int  # for KV
    fixed_bytes: int  # of each sequence: rings and recurrent state
    token_bytes: int

    formats: tuple[KvFormat, ...] = (FULL_PRECISION,)  # how a running sequence may be held, the most exact first
    live_formats: Mapping[int, KvFormat] = field(default_factory=dict)  # what other settings would allow, by bits

    def bytes_for(self, num_tokens: int, rung: KvFormat = FULL_PRECISION) -> int:
        raw = num_tokens if rung.raw_tokens is None else round_up(min(num_tokens, rung.raw_tokens))
        return self.fixed_bytes + raw * self.token_bytes + math.ceil(max(0, num_tokens - raw) * rung.token_bytes)

    def tokens_in(self, nbytes: int, rung: KvFormat = FULL_PRECISION) -> int:
        """How many a sequence can have in so many bytes beside its fixed ones; tokens that take none apart."""
        raw = nbytes // self.token_bytes
        if rung.raw_tokens is None:
            return raw
        if raw <= rung.raw_tokens:
            return round_up(raw + 1) - round_up(1)
        return rung.raw_tokens + int((nbytes - rung.raw_tokens * self.token_bytes) / rung.token_bytes)

    def growth_bytes(self, num_tokens: int, held_tokens: int, rung: KvFormat) -> int:
        """Of a sequence that has room for `held_tokens`."""
        return self.bytes_for(held_tokens + num_tokens, rung) - self.bytes_for(held_tokens, rung)

    def buffer_tokens(self, num_tokens: int, held_tokens: int, rung: KvFormat, room_bytes: int | None) -> int:
        """How much room to give to a sequence that has some already and wants so much more. One that is alone takes
        what there is, `room_bytes`: no other will leave it more."""
        size = round_up(num_tokens) if rung.raw_tokens is None else num_tokens
        if room_bytes is None or not self.token_bytes or self.growth_bytes(size, held_tokens, rung) <= room_bytes:
            return size
        held_bytes = self.bytes_for(held_tokens, rung) - self.fixed_bytes
        return min(num_tokens, self.tokens_in(held_bytes + room_bytes, rung) - held_tokens)

    def bytes_held_by(self, cache: SequenceCache, rung: KvFormat = FULL_PRECISION) -> int:
        """What is reserved for a sequence's own tokens."""
        to_come = math.ceil(cache.unallocated_tokens * rung.token_bytes)
        return self.bytes_for(cache.raw_capacity) + to_come + cache.sealed_bytes

    def most_tokens(self, rung: KvFormat = FULL_PRECISION) -> int:
        """How long a sequence that grows can get if it is alone. Its last buffer may be larger than what it needs."""
        return self.tokens_in(self.total_bytes - self.fixed_bytes, rung) - (round_up(1) - 1)

    def format_for(self, num_tokens: int) -> KvFormat | None:
        """The most exact way to hold a sequence that may get so long, if it is alone; None: it never fits."""
        allowed = (rung for rung in self.formats if num_tokens >= rung.from_tokens)
        return next((rung for rung in allowed if not self.token_bytes or num_tokens <= self.most_tokens(rung)), None)

    def reply_tokens(self, prompt_tokens: int, wanted: int, *, may_be_less: bool = False) -> int:
        """How much of the wanted reply memory allows if the sequence is alone."""
        needed = prompt_tokens + wanted - 1  # the last token of a reply is never fed, so it needs no room
        if self.format_for(needed) is not None:
            return wanted
        most = max(
            (tokens for rung in self.formats if (tokens := self.most_tokens(rung)) >= rung.from_tokens), default=0
        )
        if may_be_less and most >= prompt_tokens:
            return min(wanted, most - prompt_tokens + 1)
        raise NeverFits(
            f"{prompt_tokens} tokens of prompt and {wanted} of reply need "
            f"{self.bytes_for(needed, self.formats[-1]) // MIB} MiB of KV cache, and the budget is "
            f"{self.total_bytes // MIB} MiB, {most} tokens. Raise --memory-limit, shorten the prompt, lower max_tokens"
            f"{self._lower_precision(needed)}."
        )

    def _lower_precision(self, num_tokens: int) -> str:
        """The setting that would let so many tokens in, as the end of a sentence."""
        fitting = [bits for bits, rung in self.live_formats.items() if num_tokens <= self.most_tokens(rung)]
        if not fitting:
            return ""
        bits = max(fitting)
        most = self.most_tokens(self.live_formats[bits])
        return f", or start the server with --kv-cache-live --kv-cache-bits {bits}, which holds {most} tokens"


def with_formats(budget: Budget, plans: FormatCatalog, target: Plan) -> Budget:
    """Return the budget with the KV formats that follow from the precision of new spans."""
    rungs, live = plans.formats_for(target)
    return replace(budget, formats=rungs, live_formats=live)


def pinned_memory_message(need_bytes: int, free_bytes: int, total_bytes: int) -> str:
    return (
        f"This request needs {need_bytes / MIB:.1f} MiB of KV cache. Of {total_bytes / MIB:.1f} MiB there are "
        f"{free_bytes / MIB:.1f} for it, the rest is pinned. Unpin some (POST /cache/unpin), raise --memory-limit, or "
        "shorten the request."
    )
