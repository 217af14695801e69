"""Fused blocks: which blocks are fused, and their outputs alone, in a batch and over windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.dispatch import install
from kvstrata.kv.attention_layer import AttentionLayer
from kvstrata.kv.batch_cache import AttentionRows, BatchCache
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.packed import block
from kvstrata.packed.form import DENSE
from kvstrata.packed.place import place
from tests.packed.models import EXACT, ROUNDED, logits, num_fused, quantized_model
from tests.support.models import layout_of, tiny_loaded

PROMPTS = ([5, 9, 2, 40, 41], [7, 3] * 9, [11])
STEPS = 6


def _decoded(architecture: str, rows: int) -> np.ndarray:
    """Return the logits of some decode steps of a batch."""
    module = quantized_model(architecture)
    place(module, ROUNDED)
    install()
    loaded = replace(tiny_loaded(architecture), module=module)
    layout = layout_of(loaded, None)
    caches = [SequenceCache(layout, module, 64) for _ in range(rows)]
    for cache, prompt in zip(caches, PROMPTS, strict=False):
        module(mx.array([prompt]), cache=cache.caches())
        cache.end_pass(len(prompt))
    steps = []
    batch = BatchCache(caches)
    for step in range(STEPS):
        tokens = mx.array([[13 + step + row] for row in range(rows)])
        if rows == 1:
            found = module(tokens, cache=caches[0].caches())
            caches[0].end_pass(1)
        else:
            found = module(tokens, cache=batch.begin_step())
            batch.end_step()
        steps.append(np.array(found[:, -1]))
    return np.stack(steps)


@pytest.mark.skipif(not cpu_step.available(), reason="numba is not installed")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_fused_block_decodes_the_same_without_attend_next(
    architecture: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    attend_next = cpu_step.attend_next
    monkeypatch.setattr(cpu_step, "attend_next", lambda *a: (calls.append(a), attend_next(*a))[1])
    found = _decoded(architecture, rows)
    assert calls

    for kind in (AttentionLayer, AttentionRows):
        monkeypatch.setattr(kind, "attend_next", lambda *_: None)
    calls.clear()
    expected = _decoded(architecture, rows)

    assert not calls
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(("architecture", "is_tried"), [("qwen3_next", False), ("qwen3_5", False), ("qwen3", True)])
def test_fuse_blocks_does_not_try_gated_queries(
    architecture: str, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels check no bounds: they would read beyond the norms of heads."""
    tried: list[nn.Module] = []
    monkeypatch.setattr(block, "_fuse", lambda block, *_: tried.append(block) is not None)
    overrides: dict[str, Any] = {"mlp_only_layers": [0, 1, 2, 3]} if architecture == "qwen3_next" else {}
    place(quantized_model(architecture, **overrides), EXACT)
    assert bool(tried) == is_tried


def test_fuse_blocks_keeps_blocks_whose_outputs_differ() -> None:
    plain, other = quantized_model("llama"), quantized_model("llama")
    kind = type(other.layers[0])

    class Halved(kind):
        def __call__(self, *args: Any, **options: Any) -> mx.array:
            return 0.5 * super().__call__(*args, **options)

    class Tilted(type(other.layers[0].input_layernorm)):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) + 0.01

    other.layers[1].__class__ = Halved
    other.layers[2].input_layernorm.__class__ = Tilted
    expected = quantized_model("llama")
    expected.layers[1].__class__ = Halved
    expected.layers[2].input_layernorm.__class__ = Tilted
    place(plain, EXACT)
    place(other, EXACT)
    place(expected, DENSE)
    assert (num_fused(plain), num_fused(other)) == (4, 2)
    assert np.abs(logits(other) - logits(expected)).max() <= 2e-4 * logits(expected).std()


def test_fuse_blocks_keeps_blocks_that_differ_at_large_positions() -> None:
    other = quantized_model("llama")
    kind = type(other.layers[0].self_attn)

    class Cooled(kind):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return super().__call__(x, mask, cache) * (0.5 if cache.offset > 8192 else 1.0)

    Cooled.__module__ = kind.__module__
    other.layers[0].self_attn.__class__ = Cooled
    place(other, EXACT)
    assert num_fused(other) == 3


def test_fused_block_rotates_rows_by_their_own_offsets() -> None:
    """Offsets are arrays that a cache changes in place, or one number for all rows."""
    from mlx_lm.models.cache import BatchKVCache

    dense, exact = (quantized_model("llama", num_hidden_layers=1) for _ in range(2))
    place(dense, DENSE)
    place(exact, EXACT)
    assert num_fused(exact) == 1
    ids = mx.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    for make in (make_prompt_cache, lambda _: [BatchKVCache([0, 2])]):
        logits_of = []
        for model in (dense, exact):
            caches = make(model)
            alone = make_prompt_cache(model)
            outputs = [model(some, cache=caches) for some in (ids, ids[:, :1], ids[:, 1:2])]
            outputs += [model(ids[:1, :1], cache=alone), model(ids[:1], cache=alone)]
            logits_of.append(np.concatenate([np.array(each).reshape(-1, 97) for each in outputs]))
        assert np.abs(logits_of[0] - logits_of[1]).max() <= 2e-4 * logits_of[0].std()


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_fused_block_applies_rope_scaling(rope: str) -> None:
    scaling: dict[str, Any] = {"rope_type": rope, "factor": 4.0, "original_max_position_embeddings": 64}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    dense, exact = (quantized_model("llama", rope_scaling=scaling) for _ in range(2))
    place(dense, DENSE)
    place(exact, EXACT)
    assert num_fused(exact) == 4
    expected = logits(dense, num_tokens=150)
    assert np.abs(logits(exact, num_tokens=150) - expected).max() <= 5e-4 * expected.std()


def test_fused_block_applies_interleaved_rope() -> None:
    dense, exact = (quantized_model("llama", rope_traditional=True) for _ in range(2))
    place(dense, DENSE)
    place(exact, EXACT)
    assert num_fused(exact) == 4
    assert np.abs(logits(exact) - logits(dense)).max() <= 2e-4 * logits(dense).std()


def test_fuse_blocks_keeps_blocks_with_partial_tiles() -> None:
    """Kernels of blocks write whole tiles: they would write past the end of 20 rows."""
    narrow = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 20}
    dense, exact = (quantized_model("llama", **narrow) for _ in range(2))
    place(dense, DENSE)
    place(exact, ROUNDED)
    assert num_fused(exact) == 0
    assert np.abs(logits(exact) - logits(dense)).max() <= 2e-2 * logits(dense).std()
