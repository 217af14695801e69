"""Memory, error and time of each codec on given shapes.

Memory is compared with the 16-bit dtype of a checkpoint, never with float32, and shown beside the bytes that MLX really
allocated. The values are synthetic: keys resemble those of models, with a few channels far larger than the others and
far from zero, and queries point along some of the keys, as in attention.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvstrata.bench.figures import MIB, Figure, lay_out, seconds
from kvstrata.codecs.base import Codec, EncodedArray
from kvstrata.codecs.registry import parse_for

CODECS = ("raw", "affine:8", "planes:8", "affine:4", "planes:4", "planes:2")
QUERIES = 8
TIMES = 3  # the best is reported


@dataclass(frozen=True)
class CodecFigures(Figure):
    codec: str
    nbytes: int  # K and V of all layers
    allocated_bytes: int  # by MLX, measured
    full_bytes: int  # the same in 16 bits
    ratio: float  # full_bytes / nbytes
    bits_per_value: float
    value_error: float  # root mean square, relative to the values
    score_error: float  # of q . k / sqrt(dim), root mean square, relative to the spread over the tokens of a query
    encode_s: float  # K and V of all layers
    decode_s: float


@dataclass(frozen=True)
class _Timed:
    planes: EncodedArray
    allocated_bytes: int
    encode_s: float
    decode_s: float


def measure(
    layers: int = 32,
    seq_len: int = 512,
    heads: int = 8,
    head_dim: int = 128,
    codecs: Sequence[str] = CODECS,
) -> list[CodecFigures]:
    """Return a row for each codec. Keys and values of all layers cost the same, so one layer's keys are measured."""
    chosen = [parse_for(name, head_dim) for name in codecs]
    keys = _keys(heads, seq_len, head_dim)
    queries = _queries(keys)
    return [_row(codec, keys, queries, 2 * layers) for codec in chosen]


def table(rows: Sequence[CodecFigures]) -> str:
    return lay_out(
        rows,
        [
            ("precision", "<12", lambda row: row.codec),
            ("MiB", ">9.2f", lambda row: row.nbytes / MIB),
            ("allocated", ">11.2f", lambda row: row.allocated_bytes / MIB),
            ("ratio", ">7.2f", lambda row: row.ratio),
            ("bits", ">7.2f", lambda row: row.bits_per_value),
            ("value err", ">11.4f", lambda row: row.value_error),
            ("score err", ">11.4f", lambda row: row.score_error),
            ("encode s", ">10.3f", lambda row: row.encode_s),
            ("decode s", ">10.3f", lambda row: row.decode_s),
        ],
        f"ratio: to 16 bits ({rows[0].full_bytes / MIB:.2f} MiB)",
    )


def _row(codec: Codec, keys: mx.array, queries: mx.array, num_arrays: int) -> CodecFigures:
    timed = _timed(codec, keys)
    planes = timed.planes
    full_bytes = keys.size * 2 * num_arrays
    nbytes = planes.nbytes * num_arrays
    return CodecFigures(
        codec=codec.name,
        nbytes=nbytes,
        allocated_bytes=timed.allocated_bytes * num_arrays,
        full_bytes=full_bytes,
        ratio=full_bytes / nbytes,
        bits_per_value=planes.nbytes * 8 / planes.num_values,
        value_error=_relative(codec.decode(planes, mx.float32), keys.astype(mx.float32), centred=False),
        score_error=_relative(codec.scores(queries, planes), _exact_scores(queries, keys), centred=True),
        encode_s=timed.encode_s * num_arrays,
        decode_s=timed.decode_s * num_arrays,
    )


def _timed(codec: Codec, keys: mx.array) -> _Timed:
    compute = _compute_dtype()
    planes = codec.encode(keys)
    mx.eval(codec.decode(planes, compute))
    encode_s = _best_s(lambda: codec.encode(keys))
    decode_s = _best_s(lambda: mx.eval(codec.decode(planes, compute)))
    del planes
    before = _allocated()
    planes = codec.encode(keys)
    return _Timed(planes, _allocated() - before, encode_s, decode_s)


def _compute_dtype() -> mx.Dtype:
    """Return the dtype that attention reads: MLX's CPU back-end is fast in float32 only."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def _keys(heads: int, seq_len: int, head_dim: int) -> mx.array:
    """Return keys in bfloat16 [heads, tokens, dim]; one channel in 25 is an outlier."""
    noise, which, offset = mx.random.split(mx.random.key(0), 3)
    outlier = mx.random.uniform(shape=(heads, 1, head_dim), key=which) < 0.04
    spread = mx.where(outlier, 3.0, 1.0)
    centre = mx.where(outlier, 20.0, 0.5) * mx.random.normal((heads, 1, head_dim), key=offset)
    keys = (mx.random.normal((heads, seq_len, head_dim), key=noise) * spread + centre).astype(mx.bfloat16)
    mx.eval(keys)
    return keys


def _queries(keys: mx.array) -> mx.array:
    """Return queries in float32 [heads, queries, dim]; each leans towards one key, without the mean of all keys."""
    centred = keys.astype(mx.float32) - mx.mean(keys.astype(mx.float32), axis=-2, keepdims=True)
    chosen = mx.random.randint(0, keys.shape[-2], (QUERIES,), key=mx.random.key(1))
    noise = mx.random.normal((keys.shape[0], QUERIES, keys.shape[-1]), key=mx.random.key(2))
    return 0.5 * centred[:, chosen] + noise


def _exact_scores(queries: mx.array, keys: mx.array) -> mx.array:
    return queries @ keys.astype(mx.float32).swapaxes(-1, -2)


def _relative(found: mx.array, wanted: mx.array, *, centred: bool) -> float:
    """Return the relative error. `centred` removes the mean over the last axis, which softmax does not see."""
    error = found - wanted
    if centred:
        error = error - mx.mean(error, axis=-1, keepdims=True)
        wanted = wanted - mx.mean(wanted, axis=-1, keepdims=True)
    size = float(mx.linalg.norm(wanted))
    return float(mx.linalg.norm(error)) / size if size else 0.0


def _best_s(work: Callable[[], object]) -> float:
    return min(seconds(work) for _ in range(TIMES))


def _allocated() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()
