"""Attention over parts, and the one place where mlx-lm's models are made to call it.

A layer's cache hands the model a `Parts` in place of keys and values. Models pass it on to
`scaled_dot_product_attention`, which they import by name; `install` rebinds that name to `attend`, which looks at the
type of the keys: ours go to the paths below, plain arrays to mlx-lm's own function. So mlx-lm's caches keep working in
the same process, and layers that share another layer's keys need no cache of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

# Queries of one block when the CPU works through a causal prefill: half of a square of scores is never needed.
CAUSAL_BLOCK = 128


@dataclass(frozen=True)
class Part:
    """A run of tokens of one sequence in one layer."""

    k: mx.array  # [1, kv_heads, tokens, k_dim]
    v: mx.array  # [1, kv_heads, tokens, v_dim]


@dataclass(frozen=True)
class Parts:
    """What attention reads: for each row of the batch its parts, oldest first. Stands for keys and for values."""

    rows: tuple[tuple[Part, ...], ...]


def attend(
    queries: mx.array,  # [rows, heads, tokens, k_dim]
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,  # an array, "causal" or None
    sinks: mx.array | None = None,
) -> mx.array:
    if not isinstance(keys, Parts):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    if len(keys.rows) == 1:
        return attend_row(queries, keys.rows[0], scale, mask, sinks)
    rows = [
        attend_row(queries[i : i + 1], parts, scale, _mask_of_row(mask, i), sinks) for i, parts in enumerate(keys.rows)
    ]
    return mx.concatenate(rows, axis=0)


def attend_row(
    q: mx.array, parts: Sequence[Part], scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    if len(parts) == 1:
        return attend_dense(q, parts[0].k, parts[0].v, scale, mask, sinks)
    if q.shape[2] == 1 and mask is None:
        return _attend_parts(q, parts, scale, sinks)
    # Scratch for one layer: it is gone before the next layer needs its own.
    k = mx.concatenate([part.k for part in parts], axis=2)
    v = mx.concatenate([part.v for part in parts], axis=2)
    return attend_dense(q, k, v, scale, mask, sinks)


def attend_dense(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    if sinks is not None or isinstance(mask, mx.array) or mx.default_device() != mx.cpu:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if q.shape[2] == 1:
        return _grouped(q, k, v, scale)
    return _causal_blocks(q, k, v, scale) if mask == "causal" else _grouped(q, k, v, scale)


def _attend_parts(q: mx.array, parts: Sequence[Part], scale: float, sinks: mx.array | None) -> mx.array:
    """One query over several parts: scores of each, one softmax over all, weighted sums added. Exact."""
    heads, kv_heads = q.shape[1], parts[0].k.shape[1]
    grouped = (q * scale).reshape(1, kv_heads, heads // kv_heads, q.shape[3])
    scores = [grouped @ part.k.swapaxes(-1, -2) for part in parts]
    if sinks is not None:
        # A sink takes its share of the softmax and gives nothing: a last column without a value.
        scores.append(sinks.astype(q.dtype).reshape(1, kv_heads, -1, 1))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
    out, start = None, 0
    for part in parts:
        end = start + part.k.shape[2]
        mixed = weights[..., start:end] @ part.v
        out = mixed if out is None else out + mixed
        start = end
    assert out is not None
    return out.reshape(1, heads, 1, out.shape[-1])


def _grouped(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None = None) -> mx.array:
    """Attention with the queries that share a key head stacked into one product: the CPU reads each key once."""
    rows, heads, tokens, _ = q.shape
    kv_heads = k.shape[1]
    grouped = (q * scale).reshape(rows, kv_heads, heads // kv_heads * tokens, q.shape[3])
    scores = grouped @ k.swapaxes(-1, -2)
    if mask is not None:
        shape = scores.shape
        scores = mx.where(mask, scores.reshape(rows, heads, tokens, -1), mx.finfo(scores.dtype).min).reshape(shape)
    out = mx.softmax(scores, axis=-1, precise=True) @ v
    return out.reshape(rows, heads, tokens, out.shape[-1])


def _causal_blocks(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Causal attention by blocks of queries, each over the keys that it can see."""
    tokens, total = q.shape[2], k.shape[2]
    past = total - tokens
    out = []
    for start in range(0, tokens, CAUSAL_BLOCK):
        end = min(start + CAUSAL_BLOCK, tokens)
        seen = past + end
        mask = mx.arange(past + start, seen)[:, None] >= mx.arange(seen)[None]
        out.append(_grouped(q[:, :, start:end], k[:, :, :seen], v[:, :, :seen], scale, mask))
    return mx.concatenate(out, axis=2) if len(out) > 1 else out[0]


def _mask_of_row(mask: mx.array | str | None, row: int) -> mx.array | str | None:
    if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] > 1:
        return mask[row : row + 1]
    return mask


def install() -> int:
    """Rebind the name in every loaded model module; call it after a model was loaded. Tells how many call it now."""
    name = base.scaled_dot_product_attention.__name__
    modules = [
        module for path, module in sys.modules.items() if path.startswith("mlx_lm.models.") and module is not base
    ]
    callers = [module for module in modules if hasattr(module, name)]
    for module in callers:
        setattr(module, name, attend)
    return len(callers)
