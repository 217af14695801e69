"""The portable decode kernel, run lane by lane in C++, compared with MLX's operations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.attention.metal import decode as metal_decode
from kvstrata.attention.metal import launch_plan as metal_launch_plan
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentSlice
from kvstrata.attention.stock import attend_segments
from kvstrata.codecs import backends
from kvstrata.codecs.base import Codec, EncodedArray
from kvstrata.codecs.metal.kernel_text import ArrayCounts
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.registry import parse
from tests.attention.plain_kernels import COMPILER, Plain
from tests.codecs.arrays import ROTATIONS, keys, named

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

WITHIN = 1e-4
KV_HEADS = 2
BITS = ("planes:8", "planes:4", "planes:2")
# One shape of launch for everything: a kernel takes seconds to compile.
ONE_SHAPE = (ArrayCounts(12, 8, 6),)

Rows = list[tuple[Segment, ...]]


@pytest.fixture
def one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal_launch_plan, "SHAPES", ONE_SHAPE)
    metal_launch_plan.plan.cache_clear()


def encoded(
    codec: Codec, num_tokens: int, dim: int, seed: int, position: int = 0, dtype: mx.Dtype = mx.float32
) -> EncodedArray:
    x = keys(KV_HEADS, num_tokens, dim, seed=seed, dtype=dtype)
    with backends.as_on_metal():
        return codec.encode(x, position)


def sealed(k: str, v: str, num_tokens: int, dim: int, seed: int = 0, position: int = 0) -> SealedSegment:
    return SealedSegment(
        encoded(named(k, dim), num_tokens, dim, seed, position),
        encoded(named(v, dim), num_tokens, dim, seed + 1, position),
    )


def raw(num_tokens: int, dim: int, seed: int, dtype: mx.Dtype = mx.float32, start: int = 3) -> RawSegment:
    k, v = (keys(1, KV_HEADS, start + num_tokens + 5, dim, seed=seed + i, dtype=dtype) for i in (0, 1))
    return RawSegment(k, v, num_tokens, start)


def queries(num_rows: int, group: int, dim: int, seed: int = 9) -> mx.array:
    """Scores of some tens, so that more than one token has weight."""
    return keys(num_rows, KV_HEADS * group, 1, dim, seed=seed) * 0.15


def ours(q: mx.array, rows: Rows, sinks: mx.array | None = None, run: Plain | None = None) -> mx.array:
    step = metal_decode.step_of(
        q, [[metal_decode.read_of(part) for part in parts] for parts in rows], q.shape[3] ** -0.5, sinks, "plain"
    )
    assert step is not None
    return metal_decode.attend(q, step, sinks, run or Plain())


def stock(q: mx.array, rows: Rows, sinks: mx.array | None = None) -> mx.array:
    """In float32, by the path that a Mac has without the kernel."""
    with backends.as_on_metal():
        found = [
            attend_segments(q[i : i + 1].astype(mx.float32), tuple(map(widened, parts)), q.shape[3] ** -0.5, sinks)
            for i, parts in enumerate(rows)
        ]
        return mx.concatenate(found)


def widened(part: Segment) -> Segment:
    """Raw vectors in float32: of 16-bit ones MLX's operations round the sum of each part."""
    if isinstance(part, RawSegment):
        k, v = (x.astype(mx.float32) for x in (part.k_buffer, part.v_buffer))
        return RawSegment(k, v, part.num_tokens, part.start)
    if isinstance(part, SealedSegment) and isinstance(part.v.codec, RawCodec):
        return SealedSegment(part.k, part.v.codec.adopt(part.v.arrays["values"].astype(mx.float32)))
    return part


def check(q: mx.array, rows: Rows, sinks: mx.array | None = None, run: Plain | None = None) -> None:
    found, wanted = (np.array(x.astype(mx.float32)) for x in (ours(q, rows, sinks, run), stock(q, rows, sinks)))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=WITHIN * np.abs(wanted).max())


@needs_compiler
@pytest.mark.usefixtures("one_shape")
@pytest.mark.parametrize(("dim", "group"), [(64, 2), (128, 4)])
def test_decode_is_right_for_every_pair_of_precisions(dim: int, group: int) -> None:
    """Each pair is a row with raw tokens after it, with plain means and RoPE-aware means of each form."""
    rope_aware = [f"{bits} {rotation}" for bits, rotation in zip(BITS, ROTATIONS, strict=True)]
    pairs = product(("raw", *BITS, *rope_aware), ("raw", *BITS))
    rows: Rows = [
        (sealed(k, v, 300 + 7 * i, dim, seed=i, position=200 + 31 * i), raw(9 + i, dim, seed=90 + i))
        for i, (k, v) in enumerate(pairs)
    ]
    check(queries(len(rows), group, dim), rows)


@needs_compiler
@pytest.mark.usefixtures("one_shape")
@pytest.mark.parametrize(("k_dim", "v_dim", "group"), [(80, 80, 3), (96, 64, 1), (192, 128, 7), (256, 256, 5)])
def test_decode_is_right_for_head_dims_and_query_groups(k_dim: int, v_dim: int, group: int) -> None:
    """Query groups that no tile divides, keys and values of different dims, and a row with a sink."""
    rows: Rows = []
    for i, (k, v) in enumerate((("planes:8 halves", "planes:4"), ("planes:4 neighbours", "planes:2"))):
        part = SealedSegment(
            encoded(named(k, k_dim), 290, k_dim, i, 17 * i), encoded(named(v, v_dim), 290, v_dim, i + 5, 17 * i)
        )
        own_k, own_v = (keys(1, KV_HEADS, 12, dim, seed=20 + i) for dim in (k_dim, v_dim))
        rows.append((SegmentSlice(part, 5, 281), RawSegment(own_k, own_v, 11)))
    sinks = mx.arange(KV_HEADS * group).astype(mx.float32) * 3
    check(queries(2, group, k_dim), rows, sinks)


@needs_compiler
@pytest.mark.usefixtures("one_shape")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_values_are_read_exactly_and_results_rounded_once(dtype: mx.Dtype) -> None:
    dim = 64
    part = SealedSegment(
        encoded(parse("planes:8"), 100, dim, 1, dtype=dtype), RawCodec().encode(keys(KV_HEADS, 100, dim, dtype=dtype))
    )
    rows: Rows = [(raw(70, dim, 1, dtype),), (part, raw(30, dim, 3, dtype))]
    q = queries(2, 2, dim)
    check(q, rows)
    narrow = q.astype(dtype)
    found = np.array(ours(narrow, rows).astype(mx.float32))
    wanted = np.array(stock(narrow, rows))
    step = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
    np.testing.assert_array_less(np.abs(found - wanted), step * np.abs(wanted) + 2 * WITHIN * np.abs(wanted).max())


@needs_compiler
@pytest.mark.usefixtures("one_shape")
def test_lane_order_does_not_change_results() -> None:
    """Between a write to shared memory and a read by another lane there is a barrier."""
    dim = 64
    rows: Rows = [(sealed("planes:8 last", "planes:4", 300, dim), raw(40, dim, 3)), (raw(50, dim, 5),)]
    q = queries(2, 2, dim)
    assert mx.array_equal(ours(q, rows, run=Plain()), ours(q, rows, run=Plain(backwards=True)))


@needs_compiler
def test_decode_is_right_for_every_launch_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launch shapes beside that of the other tests: raw rows alone, and planes of fewer bits."""
    dim, shapes = 64, (ArrayCounts(0, 0, 8), ArrayCounts(8, 8, 10))
    monkeypatch.setattr(metal_launch_plan, "SHAPES", shapes)
    metal_launch_plan.plan.cache_clear()
    run = Plain()
    rows: Rows = [(raw(20 + i, dim, seed=2 * i),) for i in range(9)]
    check(queries(9, 2, dim), rows, run=run)
    assert len(run.launches) == 2 + 1
    mixed: Rows = [(sealed("planes:4", "planes:4", 60, dim, seed=i), raw(20, dim, seed=50 + i)) for i in range(3)]
    check(queries(3, 2, dim), mixed, run=run)
    assert {len(launch.inputs) - 3 for launch in run.launches if launch.text.name == "attend_segments"} == {8, 26}


@dataclass(frozen=True)
class Spec:
    """Of a part: precision of keys and values, tokens, the first one's position, what is cut off at both ends."""

    k: str
    v: str
    num_tokens: int
    position: int
    cut: tuple[int, int]

    def part(self, seed: int) -> Segment:
        if self.k == self.v == "raw":
            return raw(self.num_tokens, 64, seed, start=self.cut[0])
        whole = sealed(self.k, self.v, self.num_tokens + sum(self.cut), 64, seed, self.position)
        return SegmentSlice(whole, self.cut[0], self.cut[0] + self.num_tokens) if sum(self.cut) else whole


PRECISIONS = st.sampled_from(["raw", *BITS])
# The RoPE-aware means of all keys of a layer have one rotation; older keys have plain means.
KEYS = st.sampled_from(["raw", *BITS, *(f"{bits} halves" for bits in BITS)])
SPECS = st.builds(
    Spec,
    KEYS,
    PRECISIONS,
    st.integers(4, 600),
    st.integers(0, 600),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
)


@needs_compiler
@pytest.mark.usefixtures("one_shape")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    specs=st.lists(st.lists(SPECS, min_size=1, max_size=4), min_size=1, max_size=5),
    with_sinks=st.booleans(),
    enough=st.sampled_from([1, 16, 1024]),
)
def test_decode_is_right_for_any_segments_in_any_rows(
    monkeypatch: pytest.MonkeyPatch, specs: list[list[Spec]], with_sinks: bool, enough: int
) -> None:
    """With few groups a split has many pieces, with many groups pieces are short."""
    monkeypatch.setattr(metal_launch_plan, "ENOUGH_GROUPS", enough)
    monkeypatch.setattr(metal_launch_plan, "MOST_SPLITS", 2)
    metal_launch_plan.plan.cache_clear()
    rows: Rows = [tuple(spec.part(10 * i + 2 * j) for j, spec in enumerate(row)) for i, row in enumerate(specs)]
    sinks = mx.arange(2 * KV_HEADS).astype(mx.float32) * 10 if with_sinks else None
    check(queries(len(rows), 2, 64), rows, sinks)


@needs_compiler
@pytest.mark.usefixtures("one_shape")
def test_decode_is_right_for_segments_joined_inside_a_group() -> None:
    dim = 64
    sides = []
    for name in ("planes:8 halves", "planes:4"):
        codec = named(name, dim)
        first, second = encoded(codec, 100, dim, 1, 30), encoded(codec, 300, dim, 2, 130)
        sides.append(codec.join(first, second))
    check(queries(1, 2, dim), [(SealedSegment(*sides), raw(5, dim, 7))])


@needs_compiler
@pytest.mark.usefixtures("one_shape")
def test_decode_is_right_when_a_split_has_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest score moves from piece to piece, so earlier sums are scaled down."""
    dim = 64
    monkeypatch.setattr(metal_launch_plan, "ENOUGH_GROUPS", 1)
    monkeypatch.setattr(metal_launch_plan, "MOST_SPLITS", 1)
    metal_launch_plan.plan.cache_clear()
    run = Plain()
    check(queries(1, 2, dim), [(sealed("planes:8 halves", "planes:8", 1500, dim),)], run=run)
    assert run.launches[0].groups == (1, KV_HEADS, 1)


def test_unsupported_segments_have_no_read() -> None:
    """Such segments are left to MLX's own operations."""

    def of(codec: Codec, dim: int, num_tokens: int = 20) -> metal_decode.SegmentRead | None:
        planes = encoded(codec, num_tokens, dim, 0)
        return metal_decode.read_of(SealedSegment(planes, planes))

    assert of(PlanesCodec(8), 64) is not None
    assert of(parse("affine:8"), 64) is None
    assert of(PlanesCodec(8), 288) is None
    # Metal gets arrays of fewer than 8 entries in another way: here the scales of 2 heads and 3 tokens.
    assert of(PlanesCodec(8), 64, 3) is None
    assert metal_decode.read_of(raw(4, 72, 0)) is None
    one, other = (metal_decode.read_of(raw(4, dim, 0)) for dim in (64, 128))
    for rows, num_rows, fits in (
        ([[one]], 1, True),
        ([[one, other]], 1, False),
        ([[one]], 2, False),
        ([[]], 1, False),
        ([[one, None]], 1, False),
    ):
        assert (metal_decode.step_of(queries(num_rows, 2, 64), rows, 1.0, None, "plain") is not None) == fits


def loads_of(rows: Rows) -> list[metal_launch_plan.LaunchContents]:
    numbers, arrays = [], []
    for row, parts in enumerate(rows):
        for part in parts:
            read = metal_decode.read_of(part)
            assert read is not None
            numbers.append(metal_launch_plan.NumberedRead(row, *read[:4]))
            arrays += read.arrays
    ids = [id(array) for array in arrays]
    return metal_launch_plan.contents_of(numbers, [ids.index(each) for each in ids])


def test_rows_with_the_same_arrays_pass_them_once() -> None:
    shared = sealed("planes:8", "planes:8", 90, 64)
    rows: Rows = [(SegmentSlice(shared, 0, 20 + i), raw(9, 64, i)) for i in range(8)]
    (load,) = loads_of(rows)
    assert load.shape == ArrayCounts(6, 4, 16)
    assert [part.row for part, _ in load.segments] == sorted(2 * [*range(8)])


def test_eight_rows_take_few_launches() -> None:
    raws: Rows = [(raw(30, 64, seed=i),) for i in range(8)]
    assert len(loads_of(raws)) == 1
    for name, most in (("planes:8", 4), ("planes:4", 4)):
        rows: Rows = [(sealed(name, name, 60, 64, seed=i), raw(30, 64, seed=50 + i)) for i in range(8)]
        assert len(loads_of(rows)) <= most


@given(specs=st.lists(st.lists(SPECS, min_size=1, max_size=3), min_size=1, max_size=12))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_plan_covers_every_token_of_every_row_once(specs: list[list[Spec]]) -> None:
    rows: Rows = [tuple(spec.part(10 * i + 2 * j) for j, spec in enumerate(row)) for i, row in enumerate(specs)]
    seen = [0] * len(rows)
    asked = metal_launch_plan.StepShape(len(rows), 2 * KV_HEADS, 64, 1.0, mx.float32, None, "plain")
    for load in loads_of(rows):
        found = metal_launch_plan.table_of(load, asked, metal_launch_plan.SplitSizes(64, 2))
        table = np.array(found.numbers)
        for row, (first, count) in enumerate(found.ranges):
            for split in range(first, first + count):
                of_row, at, num_pieces, _ = table[16 + 4 * split : 20 + 4 * split]
                assert of_row == row
                pieces = table[at : at + 12 * num_pieces].reshape(-1, 12)
                assert (pieces[:, 1] > 0).all()
                assert (pieces[:, 0] + pieces[:, 1] <= pieces[:, 2]).all()
                seen[row] += int(pieces[:, 1].sum())
    assert seen == [sum(part.num_tokens for part in row) for row in rows]
