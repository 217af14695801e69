"""Kernels for planes, compiled or loaded before a stream would have to wait for them."""

from __future__ import annotations

from contextlib import suppress

import mlx.core as mx

from kvstrata.attention.cuda_check import join_works
from kvstrata.codecs import paths
from kvstrata.codecs.base import UnsupportedCodec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.layers.kinds import Layout
from kvstrata.store.precision.ladder import RUNGS


def compile_planes(layout: Layout) -> int:
    """Encode and decode a vector of each kind that the layers have, under each precision; tells how many. Keys are also
    decoded to float32: a change of precision is judged in it."""
    if paths.active() != "cuda":
        return 0
    stored = [spec for spec in layout.flat() if spec.kind in ("full", "window")]
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
