"""Self-test: whether this machine computes the cache's operations correctly, and how fast. No model is needed.

Every check compares the operations in use, with whichever kernels, with numpy in float64. The results go into the file
that `kvstrata doctor --report` writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.attention import dispatch as attention_dispatch
from kvstrata.attention.dispatch import attend
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentedKV, SegmentSlice
from kvstrata.codecs import dispatch as codec_dispatch
from kvstrata.codecs import trials as codec_trials
from kvstrata.codecs.backends import HeadKind, KernelChoice, VectorKind, runtime
from kvstrata.codecs.base import Codec
from kvstrata.codecs.raw import RawCodec, exact_scores, least_rows
from kvstrata.codecs.registry import parse
from kvstrata.codecs.rope import make_rotation

HEADS, KV_HEADS, DIM = 8, 2, 128
TOKENS, OWN_TOKENS, CUT = 1000, 37, 700
ONE = 1  # a new buffer begins with one token
TIMED_TOKENS, TIMED_KV_HEADS = 8192, 8
OFFSET = 6.0  # of keys: their mean is far larger than their differences
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
PRECISIONS = ("raw", "planes:8", "planes:4", "planes:2", "affine:8")
# Allowed error, as a share of the largest output, which is rounded to the model's dtype.
ALLOWED = {"float32": 2e-3, "bfloat16": 1.2e-2, "float16": 4e-3}
# Largest error of a precision, as a share of the spread of keys and values.
LOSES = {"raw": 1e-2, "planes:8": 0.02, "planes:4": 0.2, "planes:2": 0.7, "affine:8": 0.03}


@dataclass(frozen=True)
class Check:
    what: str
    error: float | None  # None: it could not be run
    allowed: float
    reason: str = ""  # why it could not be run

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.allowed


@dataclass(frozen=True)
class Timing:
    what: str
    milliseconds: float | None  # None: it could not be run
    gigabytes_s: float | None = None
    reason: str = ""  # why it could not be run


def checks() -> list[Check]:
    return [
        *(_tried(f"16-bit scores, {name}", 1e-4, lambda d=dtype: _scores_error(d)) for name, dtype in _halves()),
        *(
            _tried(
                f"attention beside one new token, {name}", ALLOWED[name], lambda d=d: _attention_error("raw", d, ONE)
            )
            for name, d in _halves()
        ),
        *(_tried(f"{p} loses", LOSES[p], lambda p=p: _loss(parse(p))) for p in PRECISIONS),
        *(
            _tried(f"attention over {p}, {name}", ALLOWED[name], lambda p=p, d=d: _attention_error(p, d))
            for name, d in DTYPES.items()
            for p in PRECISIONS
        ),
        *(
            _tried(
                f"attention over a cut of {p}, {name}",
                ALLOWED[name],
                lambda p=p, d=d: _attention_error(p, d, is_cut=True),
            )
            for name, d in _halves()
            for p in ("raw", "planes:4")
        ),
    ]


def timings() -> list[Timing]:
    return [timing for times in (_copy_timing, _codec_timings, _attention_timings) for timing in _timed(times)]


def kernels() -> dict[str, Any]:
    """Return the back-end in use and its trial results."""
    halves = dict(_halves())
    trials = metal_trials.report([metal_trials.DecodeKind(d, DIM, DIM, HEADS // KV_HEADS) for d in DTYPES.values()])
    return {
        "path": runtime().backend,
        "decode_step_trials": trials,
        "planes_trials": codec_trials.report(),
        "choices": [asdict(choice) for choice in typical_choices(*DTYPES)],
        "rows_for_16_bit_scores": {name: least_rows(dtype) for name, dtype in halves.items()},
    }


def typical_choices(*names: str) -> list[KernelChoice]:
    """Return the back-end that computes each operation on KV of a usual model of these dtypes, and why. Runs no
    trial."""
    k_rotation = make_rotation(10_000.0 ** (-np.arange(DIM // 2) / (DIM // 2)))
    kinds = [HeadKind(VectorKind(DTYPES[name], DIM, k_rotation), VectorKind(DTYPES[name], DIM)) for name in names]
    return [*attention_dispatch.explain(kinds), *codec_dispatch.explain(kinds)]


def _halves() -> Iterator[tuple[str, mx.Dtype]]:
    yield from ((name, dtype) for name, dtype in DTYPES.items() if dtype != mx.float32)


def _tried(what: str, allowed: float, measure: Callable[[], float]) -> Check:
    try:
        return Check(what, measure(), allowed)
    except Exception as error:  # noqa: BLE001
        # Any error of a back-end belongs into the report.
        return Check(what, None, allowed, f"{type(error).__name__}: {error}"[:300])


def _timed(times: Callable[[], Iterator[Timing]]) -> Iterator[Timing]:
    try:
        yield from times()
    except Exception as error:  # noqa: BLE001
        yield Timing(times.__name__.strip("_"), None, reason=f"{type(error).__name__}: {error}"[:300])


def _scores_error(dtype: mx.Dtype) -> float:
    q, k = (_normal((KV_HEADS, rows, DIM), rows, OFFSET).astype(dtype) for rows in (4, TOKENS))
    expected = _wide(q) @ _wide(k).swapaxes(-1, -2)
    return float(np.abs(_wide(exact_scores(q, k)) - expected).max() / np.abs(expected).max())


def _loss(codec: Codec) -> float:
    x = _normal((KV_HEADS, TOKENS, DIM), 3, OFFSET)
    decoded = codec.decode(codec.encode(x), mx.float32)
    return float(np.sqrt(np.mean((_wide(decoded) - _wide(x)) ** 2)) / np.std(_wide(x)))


def _attention_error(precision: str, dtype: mx.Dtype, own_tokens: int = OWN_TOKENS, *, is_cut: bool = False) -> float:
    parts = _parts(parse(precision), dtype, own_tokens, is_cut=is_cut)
    # Queries with some of the keys' offset: scores near 100, which differ by a few.
    q = _normal((1, HEADS, 1, DIM), 6, OFFSET / 4).astype(dtype)
    keys = SegmentedKV((parts,))
    found = _wide(attend(q, keys, keys, None, DIM**-0.5, None))
    dense = [part.dense(mx.float32) for part in parts]
    k, v = (np.concatenate([_wide(pair[i]) for pair in dense], axis=2) for i in range(2))
    expected = _attention(_wide(q), k, v)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _parts(codec: Codec, dtype: mx.Dtype, own_tokens: int, *, is_cut: bool) -> tuple[Segment, ...]:
    k, v = (_normal((KV_HEADS, TOKENS, DIM), seed, offset).astype(dtype) for seed, offset in ((4, OFFSET), (5, 0.0)))
    if isinstance(codec, RawCodec):
        sealed = SealedSegment(codec.adopt(k), codec.adopt(v))
    else:
        sealed = SealedSegment(codec.encode(k), codec.encode(v))
    own_k, own_v = (_normal((1, KV_HEADS, own_tokens, DIM), seed, offset) for seed, offset in ((7, OFFSET), (8, 0.0)))
    own = RawSegment(own_k.astype(dtype), own_v.astype(dtype), own_tokens)
    return (SegmentSlice(sealed, 0, CUT) if is_cut else sealed, own)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute attention of one row with one query per head, as the reference."""
    grouped = q.reshape(1, KV_HEADS, -1, DIM) * DIM**-0.5
    scores = grouped @ k.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).reshape(q.shape)


def _copy_timing() -> Iterator[Timing]:
    x = mx.zeros((64 << 20,), mx.uint8)
    mx.eval(x)
    seconds = _seconds(lambda: mx.eval(x + 1))
    yield Timing("copy of 64 MiB", 1e3 * seconds, 2 * x.nbytes / seconds / 1e9)


def _codec_timings() -> Iterator[Timing]:
    x = _normal((TIMED_KV_HEADS, TIMED_TOKENS, DIM), 1).astype(mx.bfloat16)
    mx.eval(x)
    for precision in PRECISIONS[1:]:
        codec = parse(precision)
        planes = codec.encode(x)
        nbytes = x.nbytes + planes.nbytes
        for what, work in (
            ("encode", lambda codec=codec: codec.encode(x)),
            ("decode", lambda codec=codec, planes=planes: mx.eval(codec.decode(planes, mx.bfloat16))),
        ):
            seconds = _seconds(work)
            yield Timing(f"{what} {precision}, {TIMED_TOKENS} tokens", 1e3 * seconds, nbytes / seconds / 1e9)


def _attention_timings() -> Iterator[Timing]:
    q = _normal((1, 4 * TIMED_KV_HEADS, 1, DIM), 2).astype(mx.bfloat16)
    k = _normal((TIMED_KV_HEADS, TIMED_TOKENS, DIM), 1).astype(mx.bfloat16)
    mx.eval(q, k)
    own = RawSegment(k[None, :, :OWN_TOKENS], k[None, :, :OWN_TOKENS], OWN_TOKENS)
    for precision in ("raw", "planes:8", "planes:4"):
        codec = parse(precision)
        planes = codec.adopt(k) if isinstance(codec, RawCodec) else codec.encode(k)
        keys = SegmentedKV(((SealedSegment(planes, planes), own),))
        seconds = _seconds(lambda keys=keys: mx.eval(attend(q, keys, keys, None, DIM**-0.5, None)))
        what = f"attention over {precision}, {TIMED_TOKENS} tokens"
        yield Timing(what, 1e3 * seconds, 2 * planes.nbytes / seconds / 1e9)


def _seconds(work: Callable[[], object]) -> float:
    """Return the best of three times, to exclude other load on the machine."""
    work()
    best = float("inf")
    for _ in range(3):
        mx.synchronize()
        began_s = time.perf_counter()
        work()
        mx.synchronize()
        best = min(best, time.perf_counter() - began_s)
    return best


def _normal(shape: tuple[int, ...], seed: int, offset: float = 0.0) -> mx.array:
    """Return random normal values. `offset` moves each channel away from zero by its own distance."""
    rng = np.random.default_rng(seed)
    channels = np.random.default_rng(99).standard_normal(shape[-1]) * offset
    return mx.array((rng.standard_normal(shape) + channels).astype(np.float32))


def _wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)
