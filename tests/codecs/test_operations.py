"""Conformance of codec operations: each implementation against float64 numpy, over the cases of the trials and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs.backends import runtime
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cpu import planes as cpu_planes
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda import planes as cuda_planes
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.planes import TokenRange
from kvstrata.codecs.planes import HELD, PlanesCodec
from kvstrata.codecs.trials import (
    CODING_CASES,
    ENCODED_WITHIN,
    JOIN_CASES,
    PlanesCase,
    RangeCase,
    VectorKind,
    encoded_array,
)
from tests.attention import cuda_emulated
from tests.attention.plain_kernels import COMPILER, Plain
from tests.codecs import reference

ON_GPU = mx.cuda.is_available()
STOCK = PlanesCodec(8)

# Largest differences, as shares of the largest value. A trial on a user's machine allows more.
DECODED_WITHIN = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 5e-3}

KINDS = [
    VectorKind(mx.float32, 64),
    VectorKind(mx.float16, 80),
    VectorKind(mx.bfloat16, 96),
    VectorKind(mx.bfloat16, 128),
    VectorKind(mx.float32, 192),
    VectorKind(mx.float16, 256),
]
PLACEMENTS = ("halves", "neighbours", "last")


class Coding(NamedTuple):
    kind: VectorKind
    case: PlanesCase


class Joining(NamedTuple):
    kind: VectorKind
    ranges: tuple[RangeCase, ...]


# A compiler takes a second or more for each kernel, so emulated implementations run FEW.
FEW = [
    *(Coding(KINDS[0], case) for case in CODING_CASES),
    Coding(KINDS[1], PlanesCase(8, "last", num_tokens=301, position=100)),
    Coding(KINDS[3], PlanesCase(2, "neighbours")),
    Coding(KINDS[4], PlanesCase(4, num_tokens=601)),
    Coding(KINDS[5], PlanesCase(8, "halves", num_tokens=5, position=255)),
]
ALL = FEW + [
    Coding(kind, PlanesCase(bits, rotation, num_tokens=301, position=100))
    for i, kind in enumerate(KINDS)
    for bits in HELD
    for rotation in (None, PLACEMENTS[i % 3])
]
JOININGS = [Joining(kind, ranges) for kind in (KINDS[0], KINDS[3]) for ranges in JOIN_CASES]


class Implementation:
    """Stock operations; the base of native ones."""

    cases = ALL
    scores_within = mixes_within = 2e-6

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG002
        self.num_runs = 0

    def encode(self, x: mx.array, position: int, codec: PlanesCodec) -> dict[str, mx.array]:
        self.num_runs += 1
        return codec.encode_by_mlx(x, position)

    def decode(self, encoded: EncodedArray, codec: PlanesCodec, dtype: mx.Dtype) -> mx.array:
        self.num_runs += 1
        return codec.decode_by_mlx(encoded, dtype)

    def scores(self, q: mx.array, encoded: EncodedArray, codec: PlanesCodec) -> mx.array | None:
        self.num_runs += 1
        if self._has_products(encoded.dim, codec):
            return codec.scores_packed(q, encoded)
        return q @ codec.decode_stock(encoded).swapaxes(-1, -2)

    def mix(self, p: mx.array, encoded: EncodedArray, codec: PlanesCodec) -> mx.array | None:
        self.num_runs += 1
        if self._has_products(encoded.dim, codec):
            return codec.mix_packed(p, encoded)
        return p @ codec.decode_stock(encoded)

    def _has_products(self, dim: int, codec: PlanesCodec) -> bool:
        """Whether MLX's quantized products are a path here: on CUDA they are none, and lack shapes."""
        return codec.has_products(dim) and not ON_GPU

    def join(self, ranges: Sequence[TokenRange], dtype: mx.Dtype) -> mx.array:
        raise NotImplementedError


class Cpu(Implementation):
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if runtime().backend != "cpu":
            pytest.skip("needs a CPU with numba")
        super().__init__(monkeypatch)

    def encode(self, x: mx.array, position: int, codec: PlanesCodec) -> dict[str, mx.array]:
        self.num_runs += 1
        return cpu_planes.encode_planes(x.astype(mx.float32), position, codec.rotation)

    def decode(self, encoded: EncodedArray, codec: PlanesCodec, dtype: mx.Dtype) -> mx.array:
        self.num_runs += 1
        return cpu_planes.decode_planes(encoded.arrays, codec.bits, codec.means_of(encoded)).astype(dtype)

    def scores(self, q: mx.array, encoded: EncodedArray, codec: PlanesCodec) -> mx.array:
        self.num_runs += 1
        return cpu_planes.score_planes(q, encoded.arrays, codec.bits) + codec.means_of(encoded).shares(q)

    def mix(self, p: mx.array, encoded: EncodedArray, codec: PlanesCodec) -> mx.array:
        self.num_runs += 1
        return cpu_planes.mix_planes(p, encoded.arrays, codec.bits, encoded.mean_runs)


class Cuda(Implementation):
    """CUDA's kernels, on a GPU or emulated. Queries and weights have 14 bits where they meet codes."""

    cases = ALL if ON_GPU else FEW
    scores_within = mixes_within = 2e-4

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not ON_GPU and not cuda_emulated.works():
            pytest.skip("needs a GPU with CUDA, or Linux and a C++ compiler")
        super().__init__(monkeypatch)
        if not ON_GPU:
            cuda_emulated.install(monkeypatch)
        run = cuda_kernels.Kernel.run

        def counted(*args: object, **launch: object) -> list[mx.array]:
            self.num_runs += 1
            return run(*args, **launch)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(cuda_kernels.Kernel, "run", counted)

    def encode(self, x: mx.array, position: int, codec: PlanesCodec) -> dict[str, mx.array]:
        return cuda_planes.encode_planes(x, codec.bits, position, codec.rotation)

    def decode(self, encoded: EncodedArray, codec: PlanesCodec, dtype: mx.Dtype) -> mx.array:  # noqa: ARG002
        return cuda_planes.decode_planes(encoded, dtype)

    def scores(self, q: mx.array, encoded: EncodedArray, codec: PlanesCodec) -> mx.array | None:  # noqa: ARG002
        fits = cuda_planes.takes_queries(q.shape[-2], encoded.dim)
        return cuda_planes.score_planes(q, encoded) if fits else None

    def mix(self, p: mx.array, encoded: EncodedArray, codec: PlanesCodec) -> mx.array | None:  # noqa: ARG002
        fits = cuda_planes.takes_queries(p.shape[-2], encoded.dim)
        return cuda_planes.mix_planes(p, encoded) if fits else None


class Portable(Implementation):
    """The kernels of Metal as plain C++. Metal has none for scores and mixes."""

    cases = FEW

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if COMPILER is None:
            pytest.skip("needs a C++ compiler")
        super().__init__(monkeypatch)
        self._run = Plain()

    def _counted(self, made: dict[str, mx.array] | mx.array) -> None:
        self.num_runs = len(self._run.launches)
        mx.eval(made)

    def encode(self, x: mx.array, position: int, codec: PlanesCodec) -> dict[str, mx.array]:
        made = metal_planes.encode(x, codec.bits, position, codec.rotation, "plain", self._run)
        self._counted(made)
        return made

    def decode(self, encoded: EncodedArray, codec: PlanesCodec, dtype: mx.Dtype) -> mx.array:  # noqa: ARG002
        made = metal_planes.decode(encoded, dtype, "plain", self._run)
        self._counted(made)
        return made

    def join(self, ranges: Sequence[TokenRange], dtype: mx.Dtype) -> mx.array:
        made = metal_planes.join(ranges, dtype, "plain", self._run)
        self._counted(made)
        return made


@pytest.fixture
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Implementation]:
    made = request.param(monkeypatch)
    yield made
    assert made.num_runs, "no case reached the implementation"


def for_each(*kinds: Callable[[pytest.MonkeyPatch], Implementation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("implementation", kinds, ids=lambda kind: kind.__name__, indirect=True)


def largest_error(found: mx.array, wanted: np.ndarray) -> float:
    return float(np.abs(reference.float64(found) - wanted).max() / np.abs(wanted).max())


@for_each(Implementation, Cpu, Cuda, Portable)
def test_encoded_vectors_are_those_of_float64(implementation: Implementation) -> None:
    for kind, case in implementation.cases:
        codec, x = case.codec(kind.dim, STOCK), case.vectors(kind)
        if case.num_tokens == 301:
            x[0, 3], x[0, 7, 2], x[1, 9, 1] = 0.0, float("nan"), float("inf")
        arrays = implementation.encode(x, case.position, codec)
        held = {name: arrays[name] for name in (*HELD[codec.bits], "scales", "means")}
        found = reference.decode(encoded_array(codec, held, x, case.position))
        wanted = reference.round_trip(x, codec.bits, case.position, codec.rotation)
        usual = np.abs(wanted) < 100
        error = np.abs(found - wanted)[usual].mean() / np.abs(wanted[usual]).mean()
        assert error <= ENCODED_WITHIN, (kind, case)


@for_each(Implementation, Cpu, Cuda, Portable)
def test_decoded_vectors_are_those_of_float64(implementation: Implementation) -> None:
    for kind, case in implementation.cases:
        encoded = case.encoded(kind, STOCK)
        found = implementation.decode(encoded, case.codec(kind.dim, STOCK), kind.dtype)
        assert found.dtype == kind.dtype
        assert largest_error(found, reference.decode(encoded)) <= DECODED_WITHIN[kind.dtype], (kind, case)


@for_each(Implementation, Cpu, Cuda)
@pytest.mark.parametrize("num_queries", [1, 7])
def test_scores_are_those_of_float64(implementation: Implementation, num_queries: int) -> None:
    for kind, case in implementation.cases:
        encoded = case.encoded(kind, STOCK)
        q = mx.random.normal((case.heads, num_queries, kind.dim), key=mx.random.key(1))
        found = implementation.scores(q, encoded, case.codec(kind.dim, STOCK))
        if found is not None:
            wanted = reference.float64(q) @ reference.decode(encoded).swapaxes(1, 2)
            assert largest_error(found, wanted) <= implementation.scores_within, (kind, case)


@for_each(Implementation, Cpu, Cuda)
@pytest.mark.parametrize("num_queries", [1, 7])
def test_mixes_are_those_of_float64(implementation: Implementation, num_queries: int) -> None:
    for kind, case in implementation.cases:
        case = replace(case, rotation=None)  # values have none
        encoded = case.encoded(kind, STOCK)
        p = mx.softmax(mx.random.normal((case.heads, num_queries, case.num_tokens), key=mx.random.key(2)), axis=-1)
        found = implementation.mix(p, encoded, case.codec(kind.dim, STOCK))
        if found is not None:
            wanted = reference.float64(p) @ reference.decode(encoded)
            assert largest_error(found, wanted) <= implementation.mixes_within, (kind, case)


@for_each(Portable)
def test_joined_ranges_are_those_of_float64(implementation: Implementation) -> None:
    for kind, cases in JOININGS:
        ranges = [case.token_range(kind, STOCK) for case in cases]
        found = implementation.join(ranges, kind.dtype)
        dense = [
            reference.float64(held)[:, start:end]
            if isinstance(held, mx.array)
            else reference.decode(held)[:, start:end]
            for held, start, end in ranges
        ]
        assert largest_error(found, np.concatenate(dense, axis=1)) <= DECODED_WITHIN[kind.dtype], (kind, cases)
