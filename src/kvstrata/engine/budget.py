"""KV formats, and the memory that a sequence takes in each. Pure.

A running sequence is held at full precision, or encoded except for its first and newest tokens. The settings decide
which formats exist; the lowest format bounds how long a request may grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product

from kvstrata.codecs.base import Codec
from kvstrata.codecs.mean_runs import GROUP_TOKENS
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.engine.config import KvConfig
from kvstrata.errors import ConfigError, NeverFits
from kvstrata.kv.buffers import round_up
from kvstrata.kv.layout import Layout
from kvstrata.kv.precision_plan import CodecPair, PrecisionPlan, make_plan, raw_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.prefix_cache.ladder import STEP_BITS


@dataclass(frozen=True)
class KvFormat:
    """How the KV of a running sequence is held: raw up to `raw_tokens`, all other tokens encoded by `plan`."""

    plan: PrecisionPlan | None = None  # None: every token stays raw
    token_bytes: float = 0.0  # of an encoded token
    raw_tokens: int | None = None  # most raw tokens at a time; None: no bound
    from_tokens: int = 0  # shorter sequences do not use this format


FULL_PRECISION = KvFormat()

# Stands for every codec that a client may requantize to, whatever the settings: attention reads all in the same way.
ANY_CODEC = PlanesCodec(8)

MIB = 1 << 20


def make_formats(layout: Layout, config: KvConfig, chunk_tokens: int) -> tuple[KvFormat, ...]:
    """Return the KV formats that the settings allow, the most exact first."""
    highest = FULL_PRECISION
    if config.encodes_running:
        highest = _make_format(layout, config, config.k, config.v, chunk_tokens)
    candidates: list[KvFormat] = []
    if config.dynamic:
        levels = [bits for bits in STEP_BITS if bits >= config.floor_bits]
        # Values step down before keys.
        steps = [(k, v) for k, v in product(levels, repeat=2) if k in (v, 2 * v)]
        candidates += [_make_format(layout, config, PlanesCodec(k), PlanesCodec(v), chunk_tokens) for k, v in steps]
    candidates += [
        _make_format(layout, config, codec, codec, chunk_tokens, from_tokens=tokens)
        for tokens, codec in config.dynamic_at
    ]
    highest_bytes = layout.token_bytes if highest.plan is None else highest.token_bytes
    lower = [each for each in candidates if each.plan is not None and each.token_bytes < highest_bytes]
    return (highest, *sorted(lower, key=lambda each: -each.token_bytes))


def live_formats(layout: Layout, config: KvConfig, chunk_tokens: int) -> dict[int, KvFormat]:
    """Return the KV formats that `--kv-cache-live` would give, by bits."""
    formats = {
        bits: _make_format(layout, config, PlanesCodec(bits), PlanesCodec(bits), chunk_tokens) for bits in STEP_BITS
    }
    return {bits: each for bits, each in formats.items() if each.plan is not None}


def _make_format(
    layout: Layout, config: KvConfig, k: Codec, v: Codec, chunk_tokens: int, from_tokens: int = 0
) -> KvFormat:
    """Return the format with these codecs; full precision where the model's layers cannot be encoded by them."""
    try:
        plan = make_plan(layout, k, v)
    except ConfigError:
        return FULL_PRECISION
    if plan.is_raw or not layout.token_bytes:
        return FULL_PRECISION
    raw_tokens = config.first_raw_tokens + config.recent_raw_tokens + GROUP_TOKENS + chunk_tokens
    # Recurrent states, and layers that only mlx-lm can read, are never encoded.
    token_bytes = min(plan.token_bytes(layout), float(layout.token_bytes))
    return KvFormat(plan, token_bytes, round_up(raw_tokens), from_tokens)


class FormatCatalog:
    """The precision plans and KV formats of one model under one set of settings."""

    def __init__(self, layout: Layout, config: KvConfig, chunk_tokens: int) -> None:
        self._layout = layout
        self._config = config
        self._chunk_tokens = chunk_tokens
        # Maps a codec of keys and one of values to a plan. Raises ConfigError where the layers cannot be encoded so.
        self.plan_of = cache(partial(make_plan, layout))

    def formats_for(self, target: PrecisionPlan) -> tuple[tuple[KvFormat, ...], dict[int, KvFormat]]:
        """Return the formats while new spans are encoded by `target`, and those that `--kv-cache-live` would give.

        A model that brings caches of its own kind is never encoded.
        """
        if any(spec.kind == "foreign" for spec in self._layout.flat()):
            return (FULL_PRECISION,), {}
        config = replace(self._config, k=target.k, v=target.v)
        return (
            make_formats(self._layout, config, self._chunk_tokens),
            live_formats(self._layout, config, self._chunk_tokens),
        )


def least_token_bytes(layout: Layout, config: KvConfig) -> float:
    """Return the bytes of a token at the lowest precision that the settings reach without a request to requantize."""
    planned = min(plan.token_bytes(layout) for plan in _reachable_plans(layout, config))
    return min(planned, layout.token_bytes) or layout.token_bytes


def sealed_pairs(layout: Layout, config: KvConfig) -> tuple[CodecPair, ...] | None:
    """Return the codecs that attention may read cached KV through; None: this model's layers cannot be encoded."""
    plan = min(_reachable_plans(layout, config), key=lambda plan: plan.token_bytes(layout))
    if not plan.is_raw:
        return plan.pairs
    try:
        plan = make_plan(layout, ANY_CODEC, ANY_CODEC)
    except ConfigError:
        return None
    return None if plan.is_raw else plan.pairs


def _reachable_plans(layout: Layout, config: KvConfig) -> list[PrecisionPlan]:
    """Return the plans that cached KV may have under these settings."""
    pairs: list[CodecPair] = [(config.k, config.v)]
    if config.dynamic:
        pairs.append((PlanesCodec(config.floor_bits), PlanesCodec(config.floor_bits)))
    pairs += [(codec, codec) for _, codec in config.dynamic_at]
    plans = [raw_plan(layout)]
    for k, v in pairs:
        try:
            plans.append(make_plan(layout, k, v))
        except ConfigError:
            # The prefix cache reports the error with the setting's name.
            continue
    return plans


@dataclass(frozen=True)
class Budget:
    """The memory for KV, and how many bytes or tokens a sequence may take of it.

    Frozen, because HTTP threads read it: a change of precision replaces the whole budget.
    """

    total_bytes: int  # for KV
    fixed_bytes: int  # of each sequence: rings and recurrent state
    token_bytes: int  # of a raw token
    formats: tuple[KvFormat, ...] = (FULL_PRECISION,)  # of running sequences, the most exact first
    live_formats: Mapping[int, KvFormat] = field(default_factory=dict)  # with --kv-cache-live, by bits

    def with_formats(self, catalog: FormatCatalog, target: PrecisionPlan) -> Budget:
        """Return this budget with the KV formats that exist while new spans are encoded by `target`."""
        formats, live = catalog.formats_for(target)
        return replace(self, formats=formats, live_formats=live)

    def bytes_for(self, num_tokens: int, kv_format: KvFormat = FULL_PRECISION) -> int:
        """Return the bytes that a sequence of this length takes."""
        raw = num_tokens if kv_format.raw_tokens is None else round_up(min(num_tokens, kv_format.raw_tokens))
        return self.fixed_bytes + raw * self.token_bytes + math.ceil(max(0, num_tokens - raw) * kv_format.token_bytes)

    def tokens_in(self, nbytes: int, kv_format: KvFormat = FULL_PRECISION) -> int:
        """Return how many tokens of a sequence `nbytes` can hold. Needs a model whose tokens take memory."""
        raw = nbytes // self.token_bytes
        if kv_format.raw_tokens is None:
            return raw
        if raw <= kv_format.raw_tokens:
            return round_up(raw + 1) - round_up(1)
        encoded_bytes = nbytes - kv_format.raw_tokens * self.token_bytes
        return kv_format.raw_tokens + int(encoded_bytes / kv_format.token_bytes)

    def growth_bytes(self, num_tokens: int, capacity: int, kv_format: KvFormat) -> int:
        """Return the bytes that `num_tokens` more take in a sequence with a capacity for `capacity` tokens."""
        return self.bytes_for(capacity + num_tokens, kv_format) - self.bytes_for(capacity, kv_format)

    def buffer_tokens(self, num_tokens: int, capacity: int, kv_format: KvFormat, free_bytes: int | None) -> int:
        """Return by how many tokens the KV buffer of a sequence with this capacity grows to hold `num_tokens` more.

        `free_bytes`: free memory where the sequence runs alone, otherwise None. A sequence that runs alone takes all of
        it, because no other sequence will free more.
        """
        size = round_up(num_tokens) if kv_format.raw_tokens is None else num_tokens
        if free_bytes is None or not self.token_bytes or self.growth_bytes(size, capacity, kv_format) <= free_bytes:
            return size
        held_bytes = self.bytes_for(capacity, kv_format) - self.fixed_bytes
        return min(num_tokens, self.tokens_in(held_bytes + free_bytes, kv_format) - capacity)

    def bytes_held_by(self, cache: SequenceCache, kv_format: KvFormat = FULL_PRECISION) -> int:
        """Return the bytes that are reserved for a sequence's own KV."""
        unallocated_bytes = math.ceil(cache.unallocated_tokens * kv_format.token_bytes)
        return self.bytes_for(cache.raw_capacity) + unallocated_bytes + cache.sealed_bytes

    def most_tokens(self, kv_format: KvFormat = FULL_PRECISION) -> int:
        """Return how long a sequence can grow alone. Its last KV buffer may be larger than the sequence needs."""
        return self.tokens_in(self.total_bytes - self.fixed_bytes, kv_format) - (round_up(1) - 1)

    def format_for(self, num_tokens: int) -> KvFormat | None:
        """Return the most exact format in which a sequence of this length fits alone; None: it fits in no format."""
        allowed = (each for each in self.formats if num_tokens >= each.from_tokens)
        return next((each for each in allowed if not self.token_bytes or num_tokens <= self.most_tokens(each)), None)

    def reply_tokens(self, prompt_tokens: int, wanted: int, *, may_be_less: bool = False) -> int:
        """Return how many of the wanted tokens of a reply fit if the sequence runs alone. Raises NeverFits."""
        needed = prompt_tokens + wanted - 1  # the model never reads the last token of a reply
        if self.format_for(needed) is not None:
            return wanted
        lengths = [(self.most_tokens(each), each.from_tokens) for each in self.formats]
        most = max((tokens for tokens, from_tokens in lengths if tokens >= from_tokens), default=0)
        if may_be_less and most >= prompt_tokens:
            return min(wanted, most - prompt_tokens + 1)
        raise NeverFits(
            f"{prompt_tokens} tokens of prompt and {wanted} of reply need "
            f"{self.bytes_for(needed, self.formats[-1]) // MIB} MiB of KV cache, and the budget is "
            f"{self.total_bytes // MIB} MiB, {most} tokens. Raise --memory-limit, shorten the prompt, lower max_tokens"
            f"{self._lower_precision_hint(needed)}."
        )

    def _lower_precision_hint(self, num_tokens: int) -> str:
        """Return the end of a sentence that names the setting under which `num_tokens` would fit; empty: none."""
        fitting = [bits for bits, each in self.live_formats.items() if num_tokens <= self.most_tokens(each)]
        if not fitting:
            return ""
        bits = max(fitting)
        most = self.most_tokens(self.live_formats[bits])
        return f", or start the server with --kv-cache-live --kv-cache-bits {bits}, which holds {most} tokens"


def pinned_memory_message(need_bytes: int, free_bytes: int, total_bytes: int) -> str:
    """Return the reason why a request cannot run beside the pinned entries."""
    return (
        f"This request needs {need_bytes / MIB:.1f} MiB of KV cache. Of {total_bytes / MIB:.1f} MiB there are "
        f"{free_bytes / MIB:.1f} for it, the rest is pinned. Unpin some (POST /cache/unpin), raise --memory-limit, or "
        "shorten the request."
    )
