"""The decode step over addresses beside float64 in numpy, over what stock operations decode. For step.py."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda import step as cuda_step
from kvstrata.attention.cuda.ranges import EncodedRange, Range, RawRange
from kvstrata.attention.segments import KernelViews, KvSlot
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda.planes import RAW_BITS
from kvstrata.codecs.mean_runs import runs_of
from kvstrata.codecs.planes import HELD, PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.rope import RopeRotation, make_rotation

ALLOWED = {mx.float16: 2e-3, mx.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Case:
    dtype: mx.Dtype
    k_dim: int
    v_dim: int
    kv_heads: int
    group: int
    num_rows: int
    most_runs: int
    seed: int
    has_rotation: bool = True
    has_sinks: bool = False

    @property
    def name(self) -> str:
        kind = str(self.dtype).split(".")[-1]
        extras = (" RoPE-aware" if self.has_rotation else "") + (" sinks" if self.has_sinks else "")
        return (
            f"{kind} {self.k_dim}/{self.v_dim} heads {self.kv_heads}x{self.group}, {self.num_rows} rows, up to "
            f"{self.most_runs} runs{extras}"
        )


def cases() -> Iterator[Case]:
    heads = mx.bfloat16, 128, 128
    yield Case(*heads, 2, 2, 1, 0, 0, has_rotation=False)
    yield Case(*heads, 2, 2, 2, 1, 1)
    yield Case(*heads, 8, 2, 5, 4, 2)
    yield Case(*heads, 2, 1, 16, 12, 3, has_rotation=False)
    yield Case(*heads, 2, 4, 9, 12, 4, has_sinks=True)
    yield Case(*heads, 4, 3, 16, 0, 5, has_sinks=True)
    yield Case(*heads, 2, 8, 7, 6, 6, has_sinks=True)
    yield Case(*heads, 2, 5, 3, 3, 7)
    yield Case(mx.float16, 64, 64, 2, 4, 6, 8, 8)
    yield Case(mx.float16, 64, 64, 3, 1, 2, 2, 9, has_rotation=False, has_sinks=True)


def slow_cases() -> Iterator[Case]:
    """Whose kernels take longer to compile."""
    yield Case(mx.float16, 256, 256, 2, 4, 4, 6, 10)
    yield Case(mx.bfloat16, 192, 128, 2, 2, 4, 5, 11)


class Rows:
    """Random parts and buffers of one layer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        rotation = some_rotation(case.k_dim) if case.has_rotation else None
        planes = [self._planes(rotation) for _ in range(max(1, case.most_runs * case.num_rows // 2))]
        raws = [self._raw(int(self.rng.integers(3, 300))) for _ in range(3)]
        self.dense: dict[KernelViews, list[np.ndarray]] = {}
        self.before = [
            [self._range((planes, raws)[int(self.rng.integers(0, 4)) == 0]) for _ in range(self._num_runs(row))]
            for row in range(case.num_rows)
        ]
        self.slots: list[KvSlot] = []
        for row in range(case.num_rows):
            size = int(self.rng.choice([64, 256, 700, 2048]))
            k, v = (self._normal(1, case.kv_heads, size, dim) for dim in (case.k_dim, case.v_dim))
            at = int(self.rng.integers(2, size - 4))
            where = KernelViews()
            # Every third row is a ring that is full: its new token lies among older ones.
            self.slots.append(KvSlot(k, v, size, at, size if row % 3 == 2 else at + 1, where))
            self.dense[where] = [wide(k)[0], wide(v)[0]]
        if case.num_rows > 1 and case.most_runs:
            # What the first row wrote before: what it writes in the step no other row may read in it.
            k, v, _, at, _, where = self.slots[0]
            self.before[-1].append(RawRange(k, v, 1, at, where))
        self.counters = mx.zeros((case.num_rows * case.kv_heads,), mx.uint32)
        self.known = cuda_step.LaunchState()

    def step(self) -> float:
        """One step, and how far it is from what it should give."""
        case = self.case
        heads = case.kv_heads * case.group
        q = self._normal(case.num_rows, heads, 1, case.k_dim)
        k, v = (self._normal(case.num_rows, case.kv_heads, 1, dim) for dim in (case.k_dim, case.v_dim))
        sinks = mx.array(self.rng.normal(size=heads) * 3).astype(mx.float32) if case.has_sinks else None
        reads = self.known.reads(self.before, self.slots)
        assert reads is not None
        out = cuda_step.attend_step(q, k, v, cuda_step.launch_of(reads, self.slots, self.counters), 0.09, sinks)
        mx.eval(out, cuda_step.held_by(self.before, self.slots))
        worst = 0.0
        for row, slot in enumerate(self.slots):
            for dense, new in zip(self.dense[slot.views], (k, v), strict=True):
                dense[:, slot.at] = wide(new)[row, :, 0]
        for row, slot in enumerate(self.slots):
            parts = [[x[:, part.start : part.end] for x in self._dense(part)] for part in self.before[row]]
            parts.append([x[:, : slot.num_tokens] for x in self.dense[slot.views]])
            wanted = attention_of(wide(q)[row, :, 0], parts, 0.09, sinks)
            worst = max(worst, float(np.abs(wide(out)[row, :, 0] - wanted).max() / np.abs(wanted).max()))
        for slot in self.slots:
            same = [np.array_equal(wide(x)[0], y) for x, y in zip(slot[:2], self.dense[slot.views], strict=True)]
            if not all(same):
                raise AssertionError("the new tokens are not where they should be")
        if mx.any(self.counters).item():
            raise AssertionError("the counters are not 0")
        self.slots = [
            slot if slot.num_tokens == slot.size else slot._replace(at=slot.at + 1, num_tokens=slot.num_tokens + 1)
            for slot in self.slots
        ]
        return worst

    def _num_runs(self, row: int) -> int:
        return self.case.most_runs if row == 0 else int(self.rng.integers(0, self.case.most_runs + 1))

    def _normal(self, *shape: int) -> mx.array:
        return mx.array(self.rng.normal(size=shape).astype(np.float32)).astype(self.case.dtype)

    def _raw(self, num_tokens: int) -> RawRange:
        k, v = (self._normal(1, self.case.kv_heads, num_tokens, dim) for dim in (self.case.k_dim, self.case.v_dim))
        return RawRange(k, v, 0, num_tokens)

    def _planes(self, rotation: RopeRotation | None) -> EncodedRange:
        num_tokens, position = int(self.rng.integers(5, 900)), int(self.rng.integers(0, 600))
        k_bits, v_bits = self.rng.choice([RAW_BITS, 8, 4, 2], size=2).tolist()
        if k_bits == v_bits == RAW_BITS:
            v_bits = 8
        k, v = (
            encoded(self._normal(self.case.kv_heads, num_tokens, dim) + 0.5, bits, t, position)
            for dim, bits, t in ((self.case.k_dim, k_bits, rotation), (self.case.v_dim, v_bits, None))
        )
        return EncodedRange(k, v, 0, num_tokens)

    def _range(self, among: Sequence[Range]) -> Range:
        whole = among[int(self.rng.integers(0, len(among)))]
        start = int(self.rng.integers(0, whole.end))
        end = int(self.rng.integers(start + 1, whole.end + 1))
        return type(whole)(whole.k, whole.v, start, end, whole.views)  # pyright: ignore[reportArgumentType]

    def _dense(self, part: Range) -> list[np.ndarray]:
        if part.views not in self.dense:
            if isinstance(part, RawRange):
                self.dense[part.views] = [wide(part.k)[0], wide(part.v)[0]]
            else:
                self.dense[part.views] = [decoded(x) for x in (part.k, part.v)]
        return self.dense[part.views]


def some_rotation(dim: int) -> RopeRotation:
    rotation = make_rotation(100.0 ** (-np.arange(dim // 2) / dim))
    assert rotation is not None
    return rotation


def encoded(x: mx.array, bits: int, rotation: RopeRotation | None, position: int) -> EncodedArray:
    """With stock operations, which compile nothing."""
    if bits == RAW_BITS:
        return RawCodec().adopt(x, position)
    codec = PlanesCodec(bits, rotation)
    arrays = codec.encode_stock(x, position)
    held = {name: arrays[name] for name in (*HELD[codec.bits], "scales", "means")}
    return EncodedArray(codec, held, x.shape[1], position, x.shape[2], runs_of(position, x.shape[1]))


def decoded(planes: EncodedArray) -> np.ndarray:
    codec = planes.codec
    return wide(codec.decode_stock(planes) if isinstance(codec, PlanesCodec) else planes.arrays["values"])


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def attention_of(
    q: np.ndarray, parts: Sequence[Sequence[np.ndarray]], scale: float, sinks: mx.array | None
) -> np.ndarray:
    """q [heads, k_dim] over segments of K and V [kv_heads, tokens, dim]"""
    k, v = (np.concatenate([pair[i] for pair in parts], axis=1) for i in (0, 1))
    grouped = q.reshape(k.shape[0], -1, q.shape[1]) * scale
    scores = grouped @ k.swapaxes(1, 2)
    every = scores
    if sinks is not None:
        every = np.concatenate([scores, wide(sinks).reshape(k.shape[0], -1, 1)], axis=2)
    largest = every.max(axis=2, keepdims=True)
    total = np.exp(every - largest).sum(axis=2, keepdims=True)
    return (np.exp(scores - largest) @ v / total).reshape(q.shape[0], -1)


def right(case: Case) -> str:
    rows = Rows(case)
    began_s = time.perf_counter()
    errors = [rows.step() for _ in range(3)]
    verdict = "ok" if all(error <= ALLOWED[case.dtype] for error in errors) else "WRONG"  # NaN is larger than nothing
    runs = sum(map(len, rows.before))
    return f"{verdict} {max(errors):.1e}, {runs} runs, {time.perf_counter() - began_s:.1f} s"
