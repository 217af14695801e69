"""What each layer's K or V loses alone: KL to full precision with that one side encoded and everything else raw.

One pass for each layer, side and precision of `planes`. Where errors are small they add up, so the table tells which
layers are worth more bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from kvstrata.bench.passes import Run, Score, Subject, Text, Window, run, score, windows_of
from kvstrata.bench.watch import UNWATCHED, Watch
from kvstrata.layers.kinds import Layout
from kvstrata.spans.plan import Plan, make_plan, raw_plan

Side = Literal["k", "v"]
SIDES: tuple[Side, ...] = ("k", "v")
BITS = (8, 4, 2)


@dataclass(frozen=True)
class LayerLoss:
    layer: int  # among all entries of the cache, as a plan counts them
    side: Side
    bits: int
    kl_mean: float
    kl_p999: float
    top1: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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
    plans = {each: make_plan(subject.layout, f"planes:{each}", f"planes:{each}") for each in bits}
    for layer in encoded_layers(subject.layout):
        watch.say(f"layer {layer}")
        for side in SIDES:
            for each, plan in plans.items():
                alone = one_side(subject.layout, plan, layer, side)
                yield _loss(layer, side, each, _scores(subject, alone, windows, references, watch))


def one_side(layout: Layout, plan: Plan, layer: int, side: Side) -> Plan:
    """The plan for K or V of this layer, everything else raw."""
    raw = raw_plan(layout)
    (k, v), (raw_k, raw_v) = plan.pairs[layer], raw.pairs[layer]
    pair = (k, raw_v) if side == "k" else (raw_k, v)
    return replace(raw, pairs=(*raw.pairs[:layer], pair, *raw.pairs[layer + 1 :]))


def _scores(
    subject: Subject, plan: Plan, windows: Sequence[Window], references: Sequence[Run], watch: Watch
) -> list[Score]:
    runs = (watch.passed(run(subject, plan, window)) for window in windows)
    return list(map(score, references, runs))


def _loss(layer: int, side: Side, bits: int, scores: Sequence[Score]) -> LayerLoss:
    kl = np.concatenate([each.kl for each in scores])
    same = np.concatenate([each.same for each in scores])
    return LayerLoss(layer, side, bits, float(kl.mean()), float(np.quantile(kl, 0.999)), float(same.mean()))
