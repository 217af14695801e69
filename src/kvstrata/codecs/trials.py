"""Trials of the portable codec kernels on this machine: cases, tolerances and timing.

Encoding, decoding, and joining (decoding several ranges to one array) are tried once for each dtype and size of
vectors, beside MLX's own operations: where a kernel fails, is inaccurate or is not faster, MLX's operations stay. CUDA
and the CPU have other kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import mlx.core as mx
import numpy as np

from kvstrata.codecs.backends import StandIn, Trial, TrialKey, VectorKind, failed, largest, relative_error, runtime
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.mean_runs import runs_of
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.kernel_text import Dialect, Run
from kvstrata.codecs.metal.planes import TokenRange
from kvstrata.codecs.rope import RopeRotation, make_rotation

What = Literal["encode", "decode", "join"]

# Largest mean difference of decoded values, as a share of their mean magnitude: a few codes are off by one.
ENCODED_WITHIN = 5e-3

# Largest difference, as a share of the largest value, which is rounded to the dtype.
DECODED_WITHIN = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1.2e-2}

Placement = Literal["halves", "neighbours", "last"]  # of the dims that a RoPE rotation rotates


@dataclass(frozen=True)
class PlanesCase:
    """Random vectors and the codec that encodes them. The conformance suite has these cases and more."""

    bits: int
    rotation: Placement | None = None
    seed: int = 0
    num_tokens: int = 300
    position: int = 200
    heads: int = 2

    def vectors(self, kind: VectorKind) -> mx.array:
        return random_vectors((self.heads, self.num_tokens, kind.dim), self.seed, kind.dtype)

    def codec(self, dim: int, stock: Any) -> Any:
        return replace(stock, bits=self.bits, rotation=rotation_for(self.rotation, dim) if self.rotation else None)

    def encoded(self, kind: VectorKind, stock: Any) -> EncodedArray:
        """Encode by MLX's operations."""
        codec, x = self.codec(kind.dim, stock), self.vectors(kind)
        return encoded_array(codec, codec.encode_by_mlx(x, self.position), x, self.position)


@dataclass(frozen=True)
class RangeCase:
    """Tokens [start, end) of encoded vectors, or of raw vectors: `case` has their number of tokens."""

    case: PlanesCase
    start: int
    end: int
    is_raw: bool = False

    def token_range(self, kind: VectorKind, stock: Any) -> TokenRange:
        held = self.case.vectors(kind) if self.is_raw else self.case.encoded(kind, stock)
        return TokenRange(held, self.start, self.end)


# Every number of bits, with RoPE-aware and plain means.
CODING_CASES = tuple(PlanesCase(bits, rotation, seed=bits) for bits in (8, 4, 2) for rotation in (None, "halves"))

_CODED = tuple(
    RangeCase(PlanesCase(bits, "halves" if i % 2 else None, seed=i), 7 * i, 300 - 5 * i)
    for i, bits in enumerate((8, 4, 2, 8, 8, 4))
)

_RAW = RangeCase(PlanesCase(8, seed=9, num_tokens=50), 3, 44, is_raw=True)

# Launches of each shape, and more ranges than a launch takes: planes of all bits, cut and whole, and raw vectors.
JOIN_CASES = ((_CODED[0], _RAW), (_CODED[1], _RAW, *_CODED[2:4], _RAW), (*_CODED, _RAW))

TIMED_HEADS, TIMED_TOKENS, TIMED_BITS, ROUNDS = 8, 2048, 4, 3

logger = logging.getLogger(__name__)


def as_if_tried(dialect: Dialect, run: Run) -> AbstractContextManager[None]:
    """Use the kernels as if their trials had passed, for tests."""
    return runtime().codec_kernels.use(dialect, run)


def dialect() -> Dialect | None:
    return runtime().codec_kernels.dialect


def portable() -> StandIn:
    """Return the dialect and the runner of the portable kernels, on a machine that has them."""
    found = dialect()
    assert found is not None
    return StandIn(found, runtime().codec_kernels.run)


def is_used(what: What, kind: VectorKind, stock: Any) -> bool:
    """Whether this machine has the kernel, and its trial passed; run the trial if it has not run yet."""
    return dialect() is not None and (bool(runtime().codec_kernels) or trial(what, kind, stock).is_used)


def known_trial(what: What, kind: VectorKind) -> Trial | None:
    """Return the trial if it has run."""
    return runtime().trials.get(TrialKey(what, _tried_kind(kind)))


def trial(what: What, kind: VectorKind, stock: Any) -> Trial:
    """Return the trial, which runs at the first call. `stock` is a codec; the trial sets its bits and RoPE rotation."""
    kind = _tried_kind(kind)
    return runtime().run_once(what, kind, lambda: _logged(_trial(what, kind, stock), kind))


def _tried_kind(kind: VectorKind) -> VectorKind:
    """Return the kind without its RoPE rotation: a trial has cases with and without a rotation."""
    return kind._replace(rotation=None)


def _logged(trial: Trial, kind: VectorKind) -> Trial:
    log = logger.info if trial.is_used else logger.warning
    log("Planes of vectors of %d, %s: %s.", kind.dim, kind.dtype, trial)
    return trial


def try_now(kind: VectorKind, stock: Any, whats: Sequence[What] = get_args(What)) -> bool:
    """Run the trials that have not run yet. False: this machine has no such kernels, or none takes such vectors."""
    if dialect() is None or not metal_planes.takes_vectors(kind.dtype, kind.dim):
        return False
    for what in whats:
        trial(what, kind, stock)
    return True


def used() -> list[str]:
    """Names of the kernels that were tried and are used, the same at every start."""
    tried = runtime().trials_of(VectorKind)
    return sorted(f"{what} {kind.dtype} {kind.dim}" for (what, kind), found in tried if found.is_used)


def report() -> list[dict[str, Any]]:
    """Results of all trials, for `doctor`."""
    tried = runtime().trials_of(VectorKind)
    return [{"vectors": [str(kind.dtype), kind.dim], **found.as_json()} for (_, kind), found in tried]


def _trial(what: What, kind: VectorKind, stock: Any) -> Trial:
    allowed = ENCODED_WITHIN if what == "encode" else DECODED_WITHIN[kind.dtype]
    try:
        error = _join_error(kind, stock) if what == "join" else _error(what, kind, stock)
        if not error <= allowed:
            return Trial(what, error, allowed)
        ours_ms, stock_ms = (_milliseconds(work) for work in _timed(what, kind, stock))
    except Exception as failure:  # noqa: BLE001
        # A compiler or a driver may fail in any way; MLX's operations remain.
        return failed(what, allowed, failure)
    return Trial(what, error, allowed, ours_ms, stock_ms)


def _timed(what: What, kind: VectorKind, stock: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return our work, and the work of MLX that it would replace."""
    codec = replace(
        stock, bits=TIMED_BITS, rotation=rotation_for("halves", kind.dim)
    )  # most models rotate keys, which takes longer
    x = random_vectors((TIMED_HEADS, TIMED_TOKENS, kind.dim), 1, kind.dtype)
    if what == "encode":
        return lambda: _encoded_ours(x, 0, codec), lambda: codec.encode_by_mlx(x, 0)
    planes = encoded_array(codec, codec.encode_by_mlx(x, 0), x, 0)
    if what == "decode":
        return lambda: metal_planes.decode(planes, kind.dtype, *portable()), lambda: codec.decode_by_mlx(
            planes, kind.dtype
        )
    ranges = [
        TokenRange(planes, 0, TIMED_TOKENS),
        TokenRange(planes, 0, TIMED_TOKENS),
        TokenRange(x, 0, TIMED_TOKENS // 4),
    ]
    return lambda: metal_planes.join(ranges, kind.dtype, *portable()), lambda: _in_turn(
        ranges, lambda planes: codec.decode(planes, kind.dtype)
    )


def _in_turn(ranges: Sequence[TokenRange], decode: Callable[[EncodedArray], mx.array]) -> mx.array:
    """Decode ranges one by one, then concatenate."""
    dense = [
        held[:, start:end] if isinstance(held, mx.array) else decode(held.view(start, end))
        for held, start, end in ranges
    ]
    return mx.concatenate(dense, axis=1)


def _by_mlx(encoded: EncodedArray, dtype: mx.Dtype) -> mx.array:
    codec: Any = encoded.codec
    return codec.decode_by_mlx(encoded, dtype)


def _join_error(kind: VectorKind, stock: Any) -> float:
    """Return the largest error of joined ranges."""
    errors = []
    for case in JOIN_CASES:
        ranges = [each.token_range(kind, stock) for each in case]
        found = metal_planes.join(ranges, kind.dtype, *portable())
        errors.append(relative_error(found, _in_turn(ranges, partial(_by_mlx, dtype=kind.dtype))))
    return largest(errors)


def _error(what: What, kind: VectorKind, stock: Any) -> float:
    """Return the largest error of encoded or decoded vectors."""
    errors = []
    for case in CODING_CASES:
        codec, theirs = case.codec(kind.dim, stock), case.encoded(kind, stock)
        wanted = codec.decode_by_mlx(theirs, kind.dtype)
        if what == "encode":
            x = case.vectors(kind)
            ours = encoded_array(codec, _encoded_ours(x, case.position, codec), x, case.position)
            errors.append(mean_error(codec.decode_by_mlx(ours, kind.dtype), wanted))
        else:
            errors.append(relative_error(metal_planes.decode(theirs, kind.dtype, *portable()), wanted))
    return largest(errors)


def _encoded_ours(x: mx.array, position: int, codec: Any) -> dict[str, mx.array]:
    return metal_planes.encode(x, codec.bits, position, codec.rotation, *portable())


def mean_error(found: mx.array, wanted: mx.array) -> float:
    """Return the mean difference as a share of the mean magnitude of `wanted`."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return float(np.array(mx.abs(found - wanted).mean() / mx.abs(wanted).mean()))


def rotation_for(placement: Placement, dim: int) -> RopeRotation:
    """Return a rotation of all dims, in halves or as neighbours, or of the last half of the dims."""
    num_pairs = dim // 4 if placement == "last" else dim // 2
    first = dim - 2 * num_pairs
    return make_rotation(100.0 ** (-np.arange(num_pairs) / dim), first=first, is_interleaved=placement == "neighbours")


def encoded_array(codec: Any, arrays: dict[str, mx.array], x: mx.array, position: int) -> EncodedArray:
    """Evaluate the arrays of vectors that were encoded from `position` on."""
    mx.eval(list(arrays.values()))
    num_tokens, dim = x.shape[-2:]
    return EncodedArray(codec, arrays, num_tokens, position, dim, runs_of(position, num_tokens))


def _milliseconds(work: Callable[[], Any]) -> float:
    """Return the best time of several runs after the first."""
    found = []
    for _ in range(1 + ROUNDS):
        mx.synchronize()
        began_s = time.perf_counter()
        mx.eval(work())
        mx.synchronize()
        found.append(1e3 * (time.perf_counter() - began_s))
    return min(found[1:])


def random_vectors(shape: tuple[int, ...], seed: int, dtype: mx.Dtype) -> mx.array:
    x = (mx.random.normal(shape, key=mx.random.key(seed)) + 1).astype(dtype)
    mx.eval(x)
    return x
