"""Peak memory of cache operations over the bytes that the cache holds, beside mlx-lm's in the same run.

held   bytes of the cache's arrays at the end: what is reserved for ours, what has grown for mlx-lm's
peak   MLX's peak memory less what was active before the cache existed
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda import step as cuda_step
from kvstrata.kv.attention_rows import AttentionRows
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.layout import LayerSpec, Layout, arrays_in
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.probe import probe

HEADS, HEAD_DIM = 2, 64
LAYERS = 8
MODEL_LAYERS = 4
NUM_ROWS = 8
VOCAB = 64


@dataclass(frozen=True)
class MemoryFigures:
    what: str
    cache: str  # kvstrata or mlx-lm
    held_bytes: int
    peak_bytes: int
    concatenations: int  # of K or V along the token axis

    @property
    def ratio(self) -> float:
        return self.peak_bytes / self.held_bytes


def grow_alone(tokens: int) -> list[MemoryFigures]:
    """Token by token, all layers in one graph: mlx-lm's worst case."""
    what = f"grow to {tokens}, {LAYERS} layers"
    ours = SequenceCache(make_layout("full"), None, tokens)
    theirs = [KVCache() for _ in range(LAYERS)]
    return [
        _measured(what, "kvstrata", lambda: _append_all(ours.flat, tokens), lambda: ours.nbytes),
        _measured(what, "mlx-lm", lambda: _append_all(theirs, tokens), lambda: _nbytes(theirs)),
    ]


def fill_window(tokens: int) -> list[MemoryFigures]:
    """A ring of a quarter of the tokens."""
    size = tokens // 4
    what = f"window of {size}, {tokens} tokens"
    ours = SequenceCache(make_layout("window", size), None, tokens)
    theirs = [RotatingKVCache(size) for _ in range(LAYERS)]
    return [
        _measured(what, "kvstrata", lambda: _append_all(ours.flat, tokens), lambda: ours.nbytes),
        _measured(what, "mlx-lm", lambda: _append_all(theirs, tokens), lambda: _nbytes(theirs)),
    ]


def grow_in_model(tokens: int) -> list[MemoryFigures]:
    """The last eighth, token by token, inside a model: layers are evaluated one after the other there."""
    model = _model()
    layout = probe(model)
    what = f"grow to {tokens} in a model of {MODEL_LAYERS} layers"
    past = tokens - tokens // 8
    ours: list[SequenceCache] = []
    theirs: list[Any] = []

    def run_ours() -> None:
        cache = SequenceCache(layout, model, tokens)
        ours.append(cache)
        append_chunks(cache.flat, past)
        cache.end_pass(past)
        for token in range(tokens - past):
            logits = model(mx.array([[token % VOCAB]]), cache=cache.caches())
            cache.end_pass(1)
            mx.eval(logits, cache.arrays())

    def run_theirs() -> None:
        theirs.extend(make_prompt_cache(model))
        append_chunks(theirs, past)
        for token in range(tokens - past):
            mx.eval(model(mx.array([[token % VOCAB]]), cache=theirs), arrays_in(theirs))

    return [
        _measured(what, "kvstrata", run_ours, lambda: ours[0].nbytes),
        _measured(what, "mlx-lm", run_theirs, lambda: _nbytes(theirs)),
    ]


def join_and_leave(tokens: int) -> list[MemoryFigures]:
    """One more sequence joins a batch, one leaves (mlx-lm: merge, extend, filter); all have a quarter of the tokens."""
    size = tokens // 4
    what = f"join and leave a batch of {NUM_ROWS}, {size} tokens each"
    ours: list[SequenceCache] = []
    theirs: list[Any] = []

    def run_ours() -> None:
        ours.extend(SequenceCache(make_layout("full"), None, size) for _ in range(NUM_ROWS + 1))
        for cache in ours:
            append_chunks(cache.flat, size - 4)
            cache.end_pass(size - 4)
        batch = BatchCache(ours[:-1])
        for members in (ours, ours[1:]):
            batch.release()
            batch = BatchCache(members)
            _append_rows([rows for rows in batch.begin_step() if isinstance(rows, AttentionRows)], len(members))
            batch.end_step()

    def run_theirs() -> None:
        alone = [[KVCache() for _ in range(LAYERS)] for _ in range(NUM_ROWS + 1)]
        for caches in alone:
            append_chunks(caches, size - 4)
        last = alone.pop()
        theirs.extend(BatchKVCache.merge(list(layer)) for layer in zip(*alone, strict=True))
        alone.clear()
        mx.eval(arrays_in(theirs))
        for batch, joining in zip(theirs, last, strict=True):
            batch.extend(BatchKVCache.merge([joining]))
        last.clear()
        _append_rows(theirs, NUM_ROWS + 1)
        for batch in theirs:
            batch.filter(mx.arange(1, NUM_ROWS + 1))
        _append_rows(theirs, NUM_ROWS)

    return [
        _measured(what, "kvstrata", run_ours, lambda: sum(cache.nbytes for cache in ours)),
        _measured(what, "mlx-lm", run_theirs, lambda: _nbytes(theirs)),
    ]


def _measured(what: str, cache: str, act: Callable[[], object], held: Callable[[], int]) -> MemoryFigures:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with counted_concatenations() as count:
        act()
    peak = mx.get_peak_memory() - before
    return MemoryFigures(what, cache, held(), peak, count())


@contextmanager
def counted_concatenations() -> Iterator[Callable[[], int]]:
    """Those along the token axis of [batch, heads, tokens, dim], by all callers of `mx.concatenate` meanwhile."""
    plain, count = mx.concatenate, 0

    def counting(arrays: Any, axis: int | None = 0, **options: Any) -> mx.array:
        nonlocal count
        arrays = list(arrays)
        count += arrays[0].ndim == 4 and axis in (2, -2)
        return plain(arrays, axis=axis, **options)

    mx.concatenate = counting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield lambda: count
    finally:
        mx.concatenate = plain  # pyright: ignore[reportAttributeAccessIssue]


def make_layout(kind: str, size: int = 0) -> Layout:
    spec = LayerSpec(kind, max_size=size, kv_heads=HEADS, k_dim=HEAD_DIM, v_dim=HEAD_DIM)  # pyright: ignore[reportArgumentType]
    return Layout((spec,) * LAYERS)


def _append_all(caches: Sequence[Any], tokens: int) -> None:
    for _ in range(tokens):
        _append_rows(caches, 1)


def _append_rows(caches: Sequence[Any], rows: int) -> None:
    new = mx.zeros((rows, HEADS, 1, HEAD_DIM))
    for cache in caches:
        keys, _ = cache.update_and_fetch(new, new)
        if isinstance(keys, cpu_step.CpuStep | cuda_step.CudaStep):
            keys.write()
    mx.eval([array for cache in caches for array in _arrays(cache)])


def append_chunks(caches: Sequence[Any], tokens: int) -> None:
    for cache in caches:
        for start in range(0, tokens, 256):
            new = mx.zeros((1, HEADS, min(256, tokens - start), HEAD_DIM))
            cache.update_and_fetch(new, new)
            mx.eval(_arrays(cache))


def _arrays(cache: Any) -> list[mx.array]:
    return cache.arrays() if hasattr(cache, "arrays") else arrays_in(cache)


def _nbytes(caches: Sequence[Any]) -> int:
    return sum(cache.nbytes for cache in caches)


def _model() -> Any:
    """Little else than a cache: what a pass computes is small beside what it keeps."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=MODEL_LAYERS,
        intermediate_size=64,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    mx.random.seed(0)
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model
