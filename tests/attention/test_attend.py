"""Attention over segments, on every path, compared with MLX's own over one array."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.dispatch import attend
from kvstrata.attention.segments import RawSegment, SegmentedKV
from kvstrata.kv.buffers import KvShape
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.window_layer import WindowLayer

TOLERANCE = 2e-5


def random_tokens(heads: int, tokens: int, dim: int, rows: int = 1) -> mx.array:
    return mx.random.normal((rows, heads, tokens, dim))


def distance(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape
    worst = mx.abs(a - b).max().item()
    assert isinstance(worst, float)
    return worst


def filled(k: mx.array, v: mx.array, pieces: list[int]) -> FullLayer:
    """A layer that holds these tokens in buffers of the given sizes."""
    layer = FullLayer(pieces[0], shape=KvShape(k.shape[1], k.shape[3], v.shape[3], k.dtype))
    for size in pieces[1:]:
        layer.grow(size)
    layer.append(k, v)
    mx.eval(layer.arrays())
    return layer


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("sinks", [False, True])
def test_decode_over_several_buffers_equals_one_array(dim: int, sinks: bool) -> None:
    mx.random.seed(dim)
    k, v, q = random_tokens(2, 50, dim), random_tokens(2, 50, dim), random_tokens(6, 1, dim)
    sink = mx.random.normal((6,)) if sinks else None
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=dim**-0.5, sinks=sink)
    layer = filled(k[:, :, :-1], v[:, :, :-1], [7, 20, 30])
    step = cpu_step.begin_step((layer,), k[:, :, -1:], v[:, :, -1:])
    assert step is not None
    assert distance(attend(q, step, step, None, dim**-0.5, None, sink), wanted) < TOLERANCE
    # What the step has written is there for MLX's operations too.
    parts = SegmentedKV((layer.segments(),))
    assert len(parts.rows[0]) == 3
    assert distance(attend(q, parts, parts, None, dim**-0.5, None, sink), wanted) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 3, 700])
def test_decode_of_rows_of_different_lengths_equals_each_alone(tokens: int) -> None:
    mx.random.seed(tokens)
    lengths = [tokens, 2 * tokens, 3 * tokens]
    keys = [random_tokens(2, n, 16) for n in lengths]
    values = [random_tokens(2, n, 24) for n in lengths]
    layers = [FullLayer(n + 1) for n in lengths]
    for layer, k, v in zip(layers, keys, values, strict=True):
        layer.append(k, v)
    q, k, v = random_tokens(4, 1, 16, rows=3), random_tokens(2, 1, 16, rows=3), random_tokens(2, 1, 24, rows=3)
    step = cpu_step.begin_step(layers, k, v)
    assert step is not None
    out = attend(q, step, step, None, 0.25, None)
    for i in range(3):
        all_k = mx.concatenate([keys[i], k[i : i + 1]], axis=2)
        all_v = mx.concatenate([values[i], v[i : i + 1]], axis=2)
        wanted = mx.fast.scaled_dot_product_attention(q[i : i + 1], all_k, all_v, scale=0.25)
        assert distance(out[i : i + 1], wanted) < TOLERANCE
    # A layer that shares these keys attends again, and nothing is written twice.
    assert distance(attend(q, step, step, None, 0.25, None), out) == 0
    assert [layer.offset for layer in layers] == [n + 1 for n in lengths]


def test_decode_with_a_mask_falls_back_to_mlx() -> None:
    k, v, q = random_tokens(2, 9, 16), random_tokens(2, 9, 16), random_tokens(4, 1, 16)
    mask = mx.arange(9)[None] >= 4
    layer = filled(k[:, :, :-1], v[:, :, :-1], [20])
    step = cpu_step.begin_step((layer,), k[:, :, -1:], v[:, :, -1:])
    assert step is not None
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
    assert distance(attend(q, step, step, None, 0.25, mask), wanted) < TOLERANCE


@pytest.mark.parametrize(("past", "tokens"), [(0, 2), (0, 300), (257, 129), (5, 1000)])
def test_prefill_over_several_buffers_equals_one_array(past: int, tokens: int) -> None:
    mx.random.seed(past)
    total = past + tokens
    k, v, q = random_tokens(2, total, 32), random_tokens(2, total, 32), random_tokens(6, tokens, 32)
    layer = filled(k, v, [total // 2, total])
    parts = SegmentedKV((layer.segments(),))
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask="causal")
    assert distance(attend(q, parts, parts, None, 0.2, "causal"), wanted) < TOLERANCE


def test_decode_of_extreme_scores_stays_finite() -> None:
    k = mx.concatenate([mx.full((1, 1, 1, 8), 100.0), mx.full((1, 1, 3, 8), -100.0)], axis=2)
    q = mx.full((1, 1, 1, 8), 100.0)
    layer = filled(k[:, :, :-1], k[:, :, :-1], [8])
    step = cpu_step.begin_step((layer,), k[:, :, -1:], k[:, :, -1:])
    assert step is not None
    assert distance(attend(q, step, step, None, 1.0, None), mx.full((1, 1, 1, 8), 100.0)) < 1e-3


def test_growth_moves_no_buffer() -> None:
    layer = filled(random_tokens(2, 10, 16), random_tokens(2, 10, 16), [10])
    before = [id(array) for array in layer.arrays()]
    layer.grow(10)
    layer.append(random_tokens(2, 1, 16), random_tokens(2, 1, 16))
    assert [id(array) for array in layer.arrays()][:2] == before
    with pytest.raises(IndexError, match="do not fit"):
        layer.append(random_tokens(2, 10, 16), random_tokens(2, 10, 16))


def test_buffer_filled_at_once_owns_its_memory() -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    layer = filled(random_tokens(2, 1 << 16, 16)[:, :, :64], random_tokens(2, 1 << 16, 16)[:, :, 64:128], [64])
    assert mx.get_active_memory() - before <= layer.nbytes * 1.02
    assert layer.nbytes == 64 * 2 * 16 * 2 * 4


@pytest.mark.parametrize("keep", [0, 4])
def test_ring_has_its_full_size_from_the_first_token_on(keep: int) -> None:
    layer = WindowLayer(32, keep)
    for i in range(1000):
        layer.append(mx.full((1, 2, 1, 16), float(i)), mx.full((1, 2, 1, 8), float(i)))
        if i in (0, 999):
            assert [array.shape for array in layer.arrays()] == [(1, 2, 32, 16), (1, 2, 32, 8)]
            assert layer.nbytes == 32 * 2 * (16 + 8) * 4
        mx.eval(layer.arrays())
    held = sorted(int(x) for x in layer.arrays()[0][0, 0, :, 0].tolist())  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
    assert held == [*range(keep), *range(1000 - 32 + keep, 1000)]


def test_raw_segment_is_the_beginning_of_its_buffer() -> None:
    part = RawSegment(random_tokens(1, 10, 4), random_tokens(1, 10, 6), 3)
    assert part.k.shape == (1, 1, 3, 4)
    assert part.v.shape == (1, 1, 3, 6)
