"""Dispatch of attention over parts, and the one place where mlx-lm's models are made to call it.

A layer's cache hands the model a `Parts` in place of keys and values. Models pass the `Parts` to
`scaled_dot_product_attention`, which they import by name; `install` rebinds that name to `attend`. `attend` looks at
the type of the keys: ours take the paths below, plain arrays go to mlx-lm's own function. Therefore mlx-lm's caches
keep working in the same process, and layers that share another layer's keys need no cache of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import base

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda import prefill as cuda_prefill
from kvstrata.attention.cuda import rows as cuda_rows
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.attention.metal.rows import decode_together
from kvstrata.attention.segments import SegmentedKV
from kvstrata.attention.stock import decode_row_by_row
from kvstrata.backend.rebinding import rebind
from kvstrata.codecs import backends, trials
from kvstrata.codecs.backends import VectorKind

Keys = SegmentedKV | cpu_step.CpuStep | cuda_rows.CudaStep | cuda_rows.PreparedStep


class ChunkKeys(NamedTuple):
    """Keys of one chunk of a prompt."""

    kv: SegmentedKV
    num_tokens: int
    mask: mx.array | str | None


@dataclass(frozen=True)
class MixedKeys:
    """Keys of a mixed pass: chunks of prompts and decode rows. Replaces both keys and values, as `Parts` does."""

    chunks: tuple[ChunkKeys, ...]
    rows: Keys | None  # None: the pass has no decode rows


def as_chunk(tokens: mx.array) -> mx.array:
    """Swap [tokens, heads, 1, dim] <-> [1, heads, tokens, dim]."""
    return tokens.swapaxes(0, 2)


def attend(
    queries: mx.array,  # [rows, heads, tokens, k_dim]
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,  # an array, "causal" or None
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(keys, MixedKeys):
        return _mixed(queries, keys, scale, sinks)
    if isinstance(keys, cpu_step.CpuStep | cuda_rows.CudaStep | cuda_rows.PreparedStep):
        if mask is None and keys.takes(queries):
            return keys.attend(queries, scale, sinks)
        keys = SegmentedKV(tuple(row.segments() for row in keys.write()))
    if not isinstance(keys, SegmentedKV):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    if queries.shape[2] == 1 and mask is None:
        return decode(queries, keys, scale, sinks)
    # Prefill of one row. The joined arrays are scratch of one layer, freed before the next layer makes its own.
    k, v = keys.to_arrays(queries)
    if mask == "causal" and sinks is None and cpu_step.fits(queries, k, v):
        return cpu_step.prefill(queries, k, v, scale)
    if backends.active() == "cuda" and cuda_prefill.takes(queries, k, v, mask, sinks):
        return cuda_prefill.attend(queries, k, v, scale, mask)
    out = mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask, sinks=sinks)
    if backends.active() == "cpu" or (backends.active() != "cuda" and keys.has_codes):
        # Without this evaluation the pass would keep the decoded arrays of every layer until its end.
        mx.eval(out)
    return out


def _mixed(queries: mx.array, keys: MixedKeys, scale: float, sinks: mx.array | None) -> mx.array:
    """Attend with the tokens of each chunk as a chunk, and with the decode rows as a decode step."""
    out, start = [], 0
    for parts, count, mask in keys.chunks:
        chunk = as_chunk(queries[start : start + count])
        if count == 1 and mask is None and backends.active() == "cuda":
            mask = "causal"  # as in longer chunks: otherwise MLX compiles kernels for one token, for seconds
        out.append(as_chunk(attend(chunk, parts, parts, None, scale, mask, sinks)))
        start += count
    if keys.rows is not None:
        out.append(attend(queries[start:], keys.rows, keys.rows, None, scale, None, sinks))
    return mx.concatenate(out)


def decode(queries: mx.array, keys: SegmentedKV, scale: float, sinks: mx.array | None) -> mx.array:
    """Attend with one query for each row over all parts of the row."""
    together = decode_together(queries, keys, scale, sinks)
    return decode_row_by_row(queries, keys, scale, sinks) if together is None else together


def kernels(kinds: Collection[cuda_rows.HeadKind]) -> str:
    """Describe for people which kernels compute attention over heads of these kinds."""
    if backends.active() == "cuda":
        return cuda_rows.kernels(kinds)
    if backends.active() == "metal":
        vectors = {VectorKind(dtype, dim) for dtype, *dims in kinds for dim in dims}
        return "; ".join([metal_trials.kernels(kinds), *trials.kernels(vectors)])
    return cpu_step.kernels()


def install() -> int:
    """Make models call `attend`, and return how many modules call it. Call it after a model was loaded."""
    return rebind(base.scaled_dot_product_attention, attend)
