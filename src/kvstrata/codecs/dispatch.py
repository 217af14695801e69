"""Dispatch of codec operations: each function is the ordered list of an operation's paths, native kernels first.

Codecs pass themselves as `stock`: they have the format and its stock arithmetic, and ask no back-end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import mlx.core as mx
import numpy as np

from kvstrata.codecs import trials
from kvstrata.codecs.backends import NOT_TRIED, HeadKind, KernelChoice, VectorKind, checked_once, no_kernels, runtime
from kvstrata.codecs.base import EncodedArray, StockPlanes, StockProducts, decode_tiles
from kvstrata.codecs.cpu import planes as cpu_planes
from kvstrata.codecs.cuda import host_copy as cuda_host_copy
from kvstrata.codecs.cuda import planes as cuda_planes
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.planes import TokenRange

T = TypeVar("T")

logger = logging.getLogger(__name__)


def encode_planes(x: mx.array, position: int, stock: StockPlanes) -> dict[str, mx.array]:
    """Encode [..., tokens, dim] to planes: at least those of `stock`, scales and means."""
    backend = runtime().backend
    if backend == "cuda" and cuda_planes.takes(x.shape[-1]):
        return cuda_planes.encode_planes(x, stock.bits, position, stock.rotation)
    if backend == "cpu":
        return cpu_planes.encode_planes(x.astype(mx.float32), position, stock.rotation)
    if metal_planes.takes(x) and trials.is_used("encode", VectorKind(x.dtype, x.shape[-1]), stock):
        made = _unless_it_fails(
            lambda: metal_planes.encode(x, stock.bits, position, stock.rotation, *trials.portable())
        )
        if made is not None:
            return made
    return stock.encode_by_mlx(x, position)


def decode_planes(encoded: EncodedArray, dtype: mx.Dtype, stock: StockPlanes) -> mx.array:
    """-> [..., tokens, dim]"""
    backend = runtime().backend
    if backend == "cpu":
        return cpu_planes.decode_planes(encoded.arrays, stock.bits, stock.means_of(encoded)).astype(dtype)
    if backend == "cuda" and cuda_planes.takes(encoded.dim):
        return cuda_planes.decode_planes(encoded, dtype)
    if metal_planes.takes_encoded(encoded, dtype) and trials.is_used("decode", VectorKind(dtype, encoded.dim), stock):
        decoded = _unless_it_fails(lambda: metal_planes.decode(encoded, dtype, *trials.portable()))
        if decoded is not None:
            return decoded
    return stock.decode_by_mlx(encoded, dtype)


def planes_scores(q: mx.array, encoded: EncodedArray, stock: StockPlanes) -> mx.array:
    """q [..., queries, dim] against keys -> float32 [..., queries, tokens]"""
    backend, num_queries = runtime().backend, q.shape[-2]
    if backend == "cpu" and cpu_planes.takes_queries(num_queries):
        scores = cpu_planes.score_planes(q.astype(mx.float32), encoded.arrays, stock.bits)
        return scores + stock.means_of(encoded).shares(q)
    if backend == "cuda" and cuda_planes.takes_queries(num_queries, encoded.dim):
        return cuda_planes.score_planes(q, encoded)
    if backend == "metal" and stock.has_products(encoded.dim):
        return stock.scores_packed(q, encoded)
    return q.astype(mx.float32) @ _decoded_for_product(encoded, stock).swapaxes(-1, -2)


def planes_mix(p: mx.array, encoded: EncodedArray, stock: StockPlanes) -> mx.array:
    """p [..., queries, tokens] with values -> float32 [..., queries, dim]"""
    backend, num_queries = runtime().backend, p.shape[-2]
    # Values have no RoPE rotation, except in models that store keys there and fetch them as plain arrays.
    if stock.rotation is None:
        if backend == "cpu" and cpu_planes.takes_queries(num_queries):
            return cpu_planes.mix_planes(p.astype(mx.float32), encoded.arrays, stock.bits, encoded.mean_runs)
        if backend == "cuda" and cuda_planes.takes_queries(num_queries, encoded.dim):
            return cuda_planes.mix_planes(p, encoded)
        if backend == "metal" and stock.has_products(encoded.dim):
            return stock.mix_packed(p, encoded)
    return p.astype(mx.float32) @ _decoded_for_product(encoded, stock)


def _decoded_for_product(encoded: EncodedArray, stock: StockPlanes) -> mx.array:
    """Decode for a product. MLX's operations use no tiles here: evaluating tiles would stop a step halfway."""
    if runtime().backend in ("cpu", "cuda"):
        return decode_planes(encoded, mx.float32, stock)
    return stock.decode_stock(encoded)


def join_planes(ranges: Sequence[TokenRange], dtype: mx.Dtype) -> mx.array | None:
    """Join consecutive ranges, encoded ones among them, to [heads, tokens, dim]. None: decode them one by one.

    CUDA joins keys and values in one launch (`attention/cuda/join.py`), a CPU decodes each range.
    """
    codec = next((held.codec for held, _, _ in ranges if isinstance(held, EncodedArray)), None)
    if codec is None or not metal_planes.takes_ranges(ranges, dtype):
        return None
    if not trials.is_used("join", VectorKind(dtype, ranges[0].dim), codec):
        return None
    return _unless_it_fails(lambda: metal_planes.join(ranges, dtype, *trials.portable()))


def decode_affine(
    encoded: EncodedArray, dtype: mx.Dtype, decode: Callable[[EncodedArray, mx.Dtype], mx.array]
) -> mx.array:
    if runtime().backend == "cpu":
        # With scales in float32: MLX takes four times as long with float16 on a CPU.
        return decode(encoded, mx.float32).astype(dtype)
    return decode_by_tiles(encoded, lambda tile: decode(tile, dtype))


def affine_scores(q: mx.array, encoded: EncodedArray, stock: StockProducts) -> mx.array:
    if runtime().backend == "metal":
        return stock.scores_packed(q, encoded)
    return q.astype(mx.float32) @ stock.decode(encoded, mx.float32).swapaxes(-1, -2)


def affine_mix(p: mx.array, encoded: EncodedArray, stock: StockProducts) -> mx.array:
    if runtime().backend == "metal":
        return stock.mix_packed(p, encoded)
    return p.astype(mx.float32) @ stock.decode(encoded, mx.float32)


def decode_by_tiles(encoded: EncodedArray, decode: Callable[[EncodedArray], mx.array]) -> mx.array:
    """Decode with MLX's operations in tiles; on CUDA in one piece and lazily, so that a prefill does not stop at each
    layer."""
    if runtime().backend == "cuda":
        return decode(encoded)
    return decode_tiles(encoded, decode)


def copy_to_host(arrays: Sequence[mx.array], into: Sequence[np.ndarray]) -> None:  # of each: uint8 [bytes]
    """Copy the bytes of each array, without gaps, into given memory: new memory for each would cost more."""
    if runtime().backend == "cuda":
        cuda_host_copy.copy_octets(arrays, into)
        return
    mx.eval(arrays)
    for array, octets in zip(arrays, into, strict=True):
        octets[:] = _host_view(array)


def host_bytes(array: mx.array) -> np.ndarray:
    """Return the bytes of an array, without gaps: uint8 [bytes]. The result may be a view of an array without gaps."""
    if runtime().backend == "cuda":
        octets = np.empty(array.nbytes, np.uint8)
        copy_to_host([array], [octets])
        return octets
    mx.eval(array)
    return _host_view(array)


def _host_view(array: mx.array) -> np.ndarray:
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.asarray(bits)).reshape(-1).view(np.uint8)


def explain(kinds: Collection[HeadKind], *, joined: bool = False) -> list[KernelChoice]:
    """Return the path of each operation on planes of such keys and values, and why. Runs no trial.

    `joined`: segments are always decoded, because the model attends to plain arrays. Scores and mixes are for few
    queries and for steps that no kernel of `attention.dispatch` takes.
    """
    choices = [choice for kind in sorted(kinds, key=repr) for choice in _explain_heads(kind)]
    return [choice for choice in choices if not (joined and choice.operation.startswith(("scores", "mix")))]


def _explain_heads(kind: HeadKind) -> list[KernelChoice]:
    k, v = kind
    paths = {
        "encode keys": _coding_path("encode", k),
        "decode keys": _coding_path("decode", k),
        "scores": _product_path(k.dim),
        "encode values": _coding_path("encode", v),
        "decode values": _coding_path("decode", v),
        "mix": ("stock", "values with a RoPE rotation are decoded") if v.rotation else _product_path(v.dim),
    }
    return [KernelChoice(f"{operation} ({kind.label})", *path) for operation, path in paths.items()]


def join_path(kind: VectorKind) -> tuple[str, str]:
    """Return the path of `join_planes`, and why."""
    if runtime().backend != "metal":
        return "stock", "segments are decoded one by one, and MLX concatenates them"
    return _portable_path("join", kind)


def _coding_path(operation: trials.What, kind: VectorKind) -> tuple[str, str]:
    backend = runtime().backend
    if backend == "cuda" and cuda_planes.takes(kind.dim):
        return "cuda", "kernels compiled at the start"
    if backend == "cpu":
        return "cpu", "kernels in numba"
    return _portable_path(operation, kind)


def _product_path(dim: int) -> tuple[str, str]:
    backend = runtime().backend
    if backend == "cpu":
        return "cpu", "kernels in numba"
    if backend == "cuda" and cuda_planes.takes_queries(1, dim):
        return "cuda", "kernels compiled at the start"
    if backend == "metal" and dim % 32 == 0:
        return "stock", "MLX's quantized products"
    return "stock", "products over decoded vectors"


def _portable_path(operation: trials.What, kind: VectorKind) -> tuple[str, str]:
    if not metal_planes.takes_vectors(kind.dtype, kind.dim):
        return "stock", "the kernel does not take vectors of this kind"
    if runtime().codec_kernels:
        return "metal", "stand-in"
    trial = trials.known_trial(operation, kind)
    if trial is not None:
        return "metal" if trial.is_used else "stock", str(trial)
    return "stock", no_kernels() if trials.dialect() is None else NOT_TRIED


def _unless_it_fails(run: Callable[[], T]) -> T | None:
    """Run a portable kernel. None: it could not be launched; coding must not fail for the sake of speed."""
    try:
        return run()
    except Exception as failure:  # noqa: BLE001
        _log_fault(f"{type(failure).__name__}: {failure}")
        return None


@checked_once
def _log_fault(fault: str) -> None:
    """Log each fault once."""
    logger.warning("Planes are made by MLX's operations, which is slower: a kernel could not be launched: %s", fault)
