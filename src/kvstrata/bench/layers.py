"""What each layer's K or V loses alone: KL to full precision with that one side encoded and everything else raw.

One pass for each layer, side and precision of `planes`. Where errors are small they add up, so the table tells which
layers are worth more bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvstrata.bench.allot import Choice, allot
from kvstrata.bench.driver import Figure
from kvstrata.bench.passes import Run, Score, Subject, Text, Window, run, score, windows_of
from kvstrata.bench.watch import UNWATCHED, Watch
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.errors import ConfigError
from kvstrata.kv.layout import Layout
from kvstrata.kv.precision_plan import PrecisionPlan, make_plan, raw_plan

Side = Literal["k", "v"]
SIDES: tuple[Side, ...] = ("k", "v")
BITS = (8, 4, 2)


@dataclass(frozen=True)
class LayerLoss(Figure):
    layer: int  # among all entries of the cache, as a plan counts them
    side: Side
    bits: int
    kl_mean: float
    kl_p999: float
    top1: float


@dataclass(frozen=True)
class LayersProtocol:
    context: int = 512
    windows: int = 1
    bits: tuple[int, ...] = BITS

    def num_passes(self, layout: Layout) -> int:
        return self.windows * (1 + len(encoded_layers(layout)) * len(SIDES) * len(self.bits))


def encoded_layers(layout: Layout) -> list[int]:
    return [i for i, spec in enumerate(layout.flat()) if spec.kind in ("full", "window", "chunked")]


def measure(subject: Subject, text: Text, protocol: LayersProtocol, watch: Watch = UNWATCHED) -> Iterator[LayerLoss]:
    """Layer by layer, K before V, in the order of the protocol's bits, each as soon as it is known."""
    windows = windows_of(text.ids, protocol.context, "prefill", protocol.windows)
    return _losses(subject, windows, protocol.bits, watch)


def _losses(subject: Subject, windows: Sequence[Window], bits: Sequence[int], watch: Watch) -> Iterator[LayerLoss]:
    watch.say("full precision")
    references = [watch.passed(run(subject, raw_plan(subject.layout), window)) for window in windows]
    plans = {each: make_plan(subject.layout, PlanesCodec(each), PlanesCodec(each)) for each in bits}
    for layer in encoded_layers(subject.layout):
        watch.say(f"layer {layer}")
        for side in SIDES:
            for each, plan in plans.items():
                alone = one_side(subject.layout, plan, layer, side)
                yield _loss(layer, side, each, _scores(subject, alone, windows, references, watch))


def one_side(layout: Layout, plan: PrecisionPlan, layer: int, side: Side) -> PrecisionPlan:
    """The plan for K or V of this layer, everything else raw."""
    raw = raw_plan(layout)
    (k, v), (raw_k, raw_v) = plan.pairs[layer], raw.pairs[layer]
    pair = (k, raw_v) if side == "k" else (raw_k, v)
    return replace(raw, pairs=(*raw.pairs[:layer], pair, *raw.pairs[layer + 1 :]))


def plan_by_layer(layout: Layout, losses: Sequence[LayerLoss], like: PrecisionPlan) -> PrecisionPlan:
    """The plan that loses least, by what each layer loses alone, and takes no more bytes than another of `planes`."""
    by_bits = {bits: make_plan(layout, PlanesCodec(bits), PlanesCodec(bits)) for bits in {loss.bits for loss in losses}}
    found: dict[tuple[int, Side], dict[int, float]] = {}
    for loss in losses:
        found.setdefault((loss.layer, loss.side), {})[loss.bits] = loss.kl_mean
    choices = [Choice(key, _num_values(layout, key), by_bit) for key, by_bit in found.items()]
    budget_bits = sum(choice.num_values * _code_bits(like, choice.key) for choice in choices)
    bits = allot(choices, budget_bits)
    pairs = list(raw_plan(layout).pairs)
    for layer in {layer for layer, _ in bits}:
        pairs[layer] = (by_bits[bits[layer, "k"]].pairs[layer][0], by_bits[bits[layer, "v"]].pairs[layer][1])
    return replace(like, pairs=tuple(pairs))


def _num_values(layout: Layout, key: tuple[int, Side]) -> int:
    layer, side = key
    spec = layout.flat()[layer]
    return spec.kv_heads * (spec.k_dim if side == "k" else spec.v_dim)


def _code_bits(plan: PrecisionPlan, key: tuple[int, Side]) -> int:
    """Without means and scales, which are as large at any precision."""
    layer, side = key
    codec = plan.pairs[layer][0 if side == "k" else 1]
    if not isinstance(codec, PlanesCodec):
        raise ConfigError(f"Only planes are compared by layer, and this is {codec.name}. Choose planes:8, 4 or 2.")
    return codec.bits


def bits_by_layer(plan: PrecisionPlan) -> str:
    """`0:8/4 1:4/4`: bits of K and V of each layer that has any."""
    pairs = [(i, k, v) for i, (k, v) in enumerate(plan.pairs)]
    return " ".join(
        f"{i}:{k.bits}/{v.bits}" for i, k, v in pairs if isinstance(k, PlanesCodec) and isinstance(v, PlanesCodec)
    )


def _scores(
    subject: Subject, plan: PrecisionPlan, windows: Sequence[Window], references: Sequence[Run], watch: Watch
) -> list[Score]:
    runs = (watch.passed(run(subject, plan, window)) for window in windows)
    return list(map(score, references, runs))


def _loss(layer: int, side: Side, bits: int, scores: Sequence[Score]) -> LayerLoss:
    kl = np.concatenate([each.kl for each in scores])
    same = np.concatenate([each.same for each in scores])
    return LayerLoss(layer, side, bits, float(kl.mean()), float(np.quantile(kl, 0.999)), float(same.mean()))
