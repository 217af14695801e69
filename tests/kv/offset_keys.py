"""Error of the logits of tiny random models with a large key bias, when their keys are encoded as planes.

`python -m tests.kv.offset_keys` prints the table of docs/quality.md: with plain means, and with RoPE-aware means.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.codecs.registry import parse
from kvstrata.kv.checkpoints import Checkpoint, needs_checkpoints, take_checkpoint
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange, prefix_of
from kvstrata.kv.transcode import transcode_checkpoints, transcode_layer
from kvstrata.models.probe import probe
from tests.kv.drive import forward, sealed_span
from tests.support.models import ARCHITECTURES, VOCAB, steady_module

# MLA's keys have a latent half, which a norm follows, and a half with RoPE.
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "in_proj_qkv", "kv_a_proj_with_mqa")
# mamba2 has no keys.
WITH_KEYS = tuple(name for name in ARCHITECTURES if name != "mamba2")
BIAS = 10.0  # standard deviation; tokens differ by about 0.6
NUM_CACHED, NUM_SCORED = 600, 32  # two groups of 256 tokens, and some of a third
NUM_SEEDS = 3
NAMES = ("planes:8", "planes:4")


@dataclass(frozen=True)
class Errors:
    """RMS error of the logits of tokens after a cached prefix, relative to their standard deviation."""

    plain: float
    rope_aware: float


def errors(architecture: str, name: str, seed: int = 0) -> Errors:
    model = biased(architecture, seed)
    layout = probe(model)
    rng = random.Random(seed)
    ids = [rng.randrange(VOCAB) for _ in range(NUM_CACHED + NUM_SCORED)]
    raw = _logits(model, layout, ids, "raw")
    plain, rope_aware = (_logits(model, each, ids, name) - raw for each in (_without_rotations(layout), layout))
    return Errors(*(float(np.sqrt(np.mean(off**2)) / raw.std()) for off in (plain, rope_aware)))


def _without_rotations(layout: Layout) -> Layout:
    return replace(layout, layers=tuple(map(_without_rotation, layout.layers)))


def _without_rotation(spec: LayerSpec) -> LayerSpec:
    return replace(spec, k_rotation=None, v_rotation=None, children=tuple(map(_without_rotation, spec.children)))


def biased(architecture: str, seed: int) -> Any:
    model = steady_module(architecture, seed=seed)
    rng = np.random.default_rng(seed)
    projections = [module for path, module in model.named_modules() if path.split(".")[-1] in KEY_PROJECTIONS]
    assert projections, f"{architecture} projects its keys under another name"
    for projection in projections:
        num_outputs = projection.weight.shape[0]
        projection.bias = mx.array(rng.normal(0, BIAS, num_outputs).astype(np.float32))
    mx.eval(model.parameters())
    return model


def _logits(model: Any, layout: Layout, ids: Sequence[int], name: str) -> np.ndarray:
    span, checkpoint = _cached(model, layout, ids[:NUM_CACHED], name)
    prefix = prefix_of(layout, [SpanRange(span, 0, NUM_CACHED)], checkpoint)
    cache = SequenceCache(layout, model, NUM_SCORED, prefix)
    return np.asarray(forward(model, cache, ids[NUM_CACHED:])).astype(np.float64)


def _cached(model: Any, layout: Layout, ids: Sequence[int], name: str) -> tuple[Span, Checkpoint | None]:
    """Return a span with these codecs, and the checkpoint at its end with its windows transcoded too."""
    cache = SequenceCache(layout, model, len(ids))
    forward(model, cache, ids)
    span = sealed_span(layout, cache)
    if needs_checkpoints(layout):
        span.checkpoints[len(ids)] = take_checkpoint(cache)
    plan = make_plan(layout, parse(name), parse(name))
    for layer in span.layers:
        transcode_layer(span, layer, plan.pairs[layer])
    list(transcode_checkpoints(span, plan))
    return span, span.checkpoints.get(len(ids))


def main() -> None:
    for architecture in WITH_KEYS:
        columns = [f"| {architecture}"]
        for name in NAMES:
            found = [errors(architecture, name, seed) for seed in range(NUM_SEEDS)]
            plain, rope_aware = (
                np.median([each.plain for each in found]),
                np.median([each.rope_aware for each in found]),
            )
            columns.append(f"{plain:.2%}, {rope_aware:.2%}")
        print(" | ".join(columns) + " |", flush=True)


if __name__ == "__main__":
    main()
