"""Trials on this machine of the kernels that read through addresses: once, before they serve anything.

The step writes into buffers behind MLX's back, and compilers and drivers differ. If the step fails or its results
differ from MLX's own attention, attention goes by sequence: slower, but correct. Likewise chunks decode segment by
segment.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda import step as cuda_step
from kvstrata.attention.cuda.join import JoinInput, join, join_input
from kvstrata.attention.cuda.ranges import RAW_DTYPES, EncodedRange, Range, RawRange
from kvstrata.attention.segments import KernelViews, KvSlot
from kvstrata.codecs.backends import checked_once, relative_error, runtime
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda.planes import FUSED_DIMS, RAW_BITS
from kvstrata.codecs.mean_runs import runs_of
from kvstrata.codecs.planes import HELD, PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.rope import RopeRotation, make_rotation

_HEADS, _GROUP, _SCALE = 2, 2, 0.1

_BUFFER_TOKENS, _NUM_BEFORE = 512, 300

CODED_BITS = ((8, 8), (4, 2), (2, 4), (RAW_BITS, 8), (4, RAW_BITS))  # of keys and of values

_TOLERANCE = 0.02  # as a share of the largest value: 16-bit rounding stays well below

logger = logging.getLogger(__name__)


@checked_once
def step_works(dtype: mx.Dtype, k_dim: int, v_dim: int) -> bool:
    """Whether this back-end has the step kernel and the kernel is right for keys and values of this kind."""
    if runtime().backend != "cuda" or dtype not in RAW_DTYPES or not {k_dim, v_dim} <= {*FUSED_DIMS}:
        return False
    try:
        error = _step_error(dtype, k_dim, v_dim)
    except (RuntimeError, ValueError) as failure:
        logger.warning("Batches attend by sequence, which is slower: the kernel does not run here: %s", failure)
        return False
    if not error < _TOLERANCE:
        logger.warning("Batches attend by sequence, which is slower: the kernel is off by %.3g here.", error)
        return False
    return True


def step_takes(keys: mx.array, values: mx.array) -> bool:
    """Whether the step kernel writes new tokens [rows, kv_heads, tokens, dim] and attends."""
    return keys.shape[2] == 1 and keys.dtype == values.dtype and step_works(keys.dtype, keys.shape[3], values.shape[3])


def joined_works(dtype: mx.Dtype, inputs: JoinInput) -> bool:
    """Whether the join kernel is right for inputs of this kind."""
    planes = next(kv for kv in inputs.ranges if isinstance(kv, EncodedRange))
    return join_works(dtype, planes.k.dim, planes.v.dim, inputs.rotation)


@checked_once
def join_works(dtype: mx.Dtype, k_dim: int, v_dim: int, rotation: RopeRotation | None) -> bool:
    if runtime().backend != "cuda" or dtype not in RAW_DTYPES or not {k_dim, v_dim} <= {*FUSED_DIMS}:
        return False
    try:
        error = _join_error(dtype, k_dim, v_dim, rotation)
    except (RuntimeError, ValueError) as failure:
        logger.warning("Chunks decode segment by segment, which is slower: the kernel does not run here: %s", failure)
        return False
    if not error < _TOLERANCE:
        logger.warning("Chunks decode segment by segment, which is slower: the kernel is off by %.3g here.", error)
        return False
    return True


def _join_error(dtype: mx.Dtype, k_dim: int, v_dim: int, rotation: RopeRotation | None) -> float:
    planes = [_planes(dtype, k_dim, v_dim, *bits, rotation) for bits in CODED_BITS]
    stored, own = (_pair(1, _BUFFER_TOKENS, k_dim, v_dim, seed, dtype) for seed in (2, 4))
    mx.eval(stored, own)
    inputs = join_input([planes[0], RawRange(*stored, 5, 70), *planes[1:]], RawRange(*own, 0, 9), dtype)
    assert inputs is not None
    dense = [_dense(kv, dtype) for kv in planes]
    dense[1:1] = [[array[:, :, 5:70] for array in stored]]
    dense.append([array[:, :, :9] for array in own])
    pairs = zip(join(inputs, dtype), zip(*dense, strict=True), strict=True)
    return max(relative_error(found, mx.concatenate(list(wanted), axis=2)) for found, wanted in pairs)


def _step_error(dtype: mx.Dtype, k_dim: int, v_dim: int) -> float:
    """Return the largest error of two steps of two rows; the second row also reads planes and tokens of the first."""
    rotation = make_rotation(100.0 ** (-np.arange(k_dim // 2) / k_dim))
    planes = [_planes(dtype, k_dim, v_dim, *bits, rotation) for bits in CODED_BITS]
    buffers = [_pair(1, _BUFFER_TOKENS, k_dim, v_dim, seed, dtype) for seed in (2, 4)]
    expected = [_pair(1, _BUFFER_TOKENS, k_dim, v_dim, seed, dtype) for seed in (2, 4)]
    mx.eval(buffers, expected)
    views = [KernelViews() for _ in buffers]
    before: list[list[Range]] = [[], [*planes, RawRange(*buffers[0], 0, 70, views[0])]]
    state = cuda_step.LaunchState()
    errors = []
    for step in range(2):
        places = (200 + step, 9 + step)
        slots = [
            KvSlot(*pair, _BUFFER_TOKENS, at, at + 1, each)
            for pair, at, each in zip(buffers, places, views, strict=True)
        ]
        q = _random((2, _HEADS * _GROUP, 1, k_dim), 10 + step, dtype)
        # The launch must also read the token it writes: the new key is near the queries, so it has most of the weight.
        new = (q[:, ::_GROUP] * 2, _random((2, _HEADS, 1, v_dim), 6 + step, dtype))
        reads = state.reads(before, slots)
        assert reads is not None
        out = cuda_step.attend_step(q, *new, cuda_step.launch_of(reads, slots, state.counters(2 * _HEADS)), _SCALE)
        mx.eval(out)
        for row, at in enumerate(places):
            for buffer, tokens in zip(expected[row], new, strict=True):
                buffer[:, :, at] = tokens[row : row + 1, :, 0]
            read = [_dense(kv, dtype) for kv in planes] if row else []
            read += [[array[:, :, :70] for array in expected[0]]] if row else []
            read.append([array[:, :, : at + 1] for array in expected[row]])
            errors.append(relative_error(out[row : row + 1], _stock(q[row : row + 1], read)))
    pairs = zip((x for pair in buffers for x in pair), (x for pair in expected for x in pair), strict=True)
    written = [mx.array_equal(*pair).item() for pair in pairs]
    return max(errors) if all(written) else float("inf")


def _planes(
    dtype: mx.Dtype, k_dim: int, v_dim: int, k_bits: int, v_bits: int, rotation: RopeRotation | None
) -> EncodedRange:
    k = _encoded_stock(k_bits, rotation, _random((_HEADS, _NUM_BEFORE, k_dim), k_bits, dtype))
    v = _encoded_stock(v_bits, None, _random((_HEADS, _NUM_BEFORE, v_dim), 20 + v_bits, dtype))
    return EncodedRange(k, v, 3, _NUM_BEFORE)


def _encoded_stock(bits: int, rotation: RopeRotation | None, x: mx.array) -> EncodedArray:
    """Encode with stock operations: encoding kernels would have to be compiled."""
    if bits == RAW_BITS:
        return RawCodec().adopt(x)
    codec = PlanesCodec(bits, rotation)
    arrays = codec.encode_stock(x, 0)
    held = {name: arrays[name] for name in (*HELD[codec.bits], "scales", "means")}
    return EncodedArray(codec, held, x.shape[1], 0, x.shape[2], runs_of(0, x.shape[1]))


def _stock(q: mx.array, read: Sequence[Sequence[mx.array]]) -> mx.array:
    k, v = (mx.concatenate([pair[i] for pair in read], axis=2) for i in (0, 1))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=_SCALE)


def _dense(kv: EncodedRange, dtype: mx.Dtype) -> list[mx.array]:
    dense = []
    for planes in (kv.k, kv.v):
        codec = planes.codec
        values = codec.decode_stock(planes) if isinstance(codec, PlanesCodec) else codec.decode(planes, dtype)
        dense.append(values.astype(dtype)[None, :, kv.start : kv.end])
    return dense


def _pair(
    num_rows: int, num_tokens: int, k_dim: int, v_dim: int, seed: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    shapes = [(num_rows, _HEADS, num_tokens, dim) for dim in (k_dim, v_dim)]
    return _random(shapes[0], seed, dtype), _random(shapes[1], seed + 1, dtype)


def _random(shape: tuple[int, ...], seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
