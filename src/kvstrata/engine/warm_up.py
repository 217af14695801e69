"""Kernels, compiled, loaded or tried before a stream would have to wait for that."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import mlx.core as mx

from kvstrata.attention import cuda_reading
from kvstrata.attention.cuda_check import join_works
from kvstrata.codecs import paths, planes_check
from kvstrata.codecs.base import UnsupportedCodec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.engine.request import Sampling
from kvstrata.engine.sampling import Sampler, sample
from kvstrata.layers.kinds import LayerSpec, Layout
from kvstrata.store.precision.ladder import RUNGS


def ready_planes(layout: Layout) -> int:
    """For each kind of vector that the layers have; tells how many, on CUDA times the precisions. Keys are also decoded
    to float32: a change of precision is judged in it."""
    stored = [spec for spec in layout.flat() if spec.kind in ("full", "window")]
    if paths.active() == "metal":
        return _try(stored)
    return _compile(stored) if paths.active() == "cuda" else 0


def _try(stored: Sequence[LayerSpec]) -> int:
    codec = PlanesCodec(8)
    kinds = {planes_check.Kind(spec.dtype, dim) for spec in stored for dim in (spec.k_dim, spec.v_dim)}
    judged = {planes_check.Kind(mx.float32, spec.k_dim) for spec in stored} - kinds
    tried = [planes_check.try_now(kind, codec) for kind in kinds]
    return sum(tried) + sum(planes_check.try_now(kind, codec, ("decode",)) for kind in judged)


def _compile(stored: Sequence[LayerSpec]) -> int:
    """Encode and decode a vector of each kind, under each precision."""
    cuda_reading.works()
    # Log-probabilities are gathered, which MLX compiles a kernel for.
    mx.eval(sample(mx.zeros((1, 8)), [Sampler(Sampling(num_logprobs=1), (), 8)]).arrays())
    for dtype, k_dim, v_dim, turn in {(spec.dtype, spec.k_dim, spec.v_dim, spec.k_turn) for spec in stored}:
        join_works(dtype, k_dim, v_dim, turn)
    keys = {(spec.k_dim, spec.k_turn, spec.dtype) for spec in stored}
    values = {(spec.v_dim, spec.v_turn, spec.dtype) for spec in stored}
    done = 0
    for vector in keys | values:
        dim, turn, dtype = vector
        for bits in RUNGS:
            codec = PlanesCodec(bits, turn)
            with suppress(UnsupportedCodec):
                planes = codec.encode(mx.zeros((1, 1, dim), dtype))
                mx.eval([codec.decode(planes, to) for to in ((dtype, mx.float32) if vector in keys else (dtype,))])
                done += 1
    return done
