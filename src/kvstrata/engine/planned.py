"""The lowest precision that the settings let KV be stored in: how many tokens may come together, and what it takes to
read them. Pure."""

from __future__ import annotations

from kvstrata.codecs.planes import PlanesCodec
from kvstrata.engine.storage import Storage
from kvstrata.errors import ConfigError
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import Pair
from kvstrata.spans.plan import Plan, make_plan, raw_plan

# What a running server may be told to change to, whatever it was started with: all codecs are read alike.
ANY_CODEC = PlanesCodec(8)


def least_token_bytes(layout: Layout, storage: Storage) -> float:
    """What a token takes at the lowest precision that KV gets to by itself."""
    planned = min(plan.token_bytes(layout) for plan in _plans(layout, storage))
    return min(planned, layout.token_bytes) or layout.token_bytes


def sealed_pairs(layout: Layout, storage: Storage) -> tuple[Pair, ...] | None:
    """Codecs that stored KV may be read through; None: this model's layers take none."""
    plan = min(_plans(layout, storage), key=lambda plan: plan.token_bytes(layout))
    if not plan.is_raw:
        return plan.pairs
    try:
        plan = make_plan(layout, ANY_CODEC, ANY_CODEC)
    except ConfigError:
        return None
    return None if plan.is_raw else plan.pairs


def _plans(layout: Layout, storage: Storage) -> list[Plan]:
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
