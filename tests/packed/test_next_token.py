"""A packed block's next token, attended to in numpy: as through MLX, alone, in a batch and over windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.dispatch import install
from kvstrata.kv.attention_layer import AttentionLayer
from kvstrata.kv.batch_cache import AttentionRows, BatchCache
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.packed.place import place
from tests.packed.test_place import ROUNDED, quantized_module
from tests.tiny import layout_of, tiny_loaded

PROMPTS = ([5, 9, 2, 40, 41], [7, 3] * 9, [11])
STEPS = 6

pytestmark = pytest.mark.skipif(not cpu_step.available(), reason="numba is not installed")


def _decoded(architecture: str, rows: int) -> np.ndarray:
    """Logits of some steps of some rows together."""
    module = quantized_module(architecture)
    place(module, ROUNDED)
    install()
    loaded = replace(tiny_loaded(architecture), module=module)
    layout = layout_of(loaded, None)
    caches = [SequenceCache(layout, module, 64) for _ in range(rows)]
    for cache, prompt in zip(caches, PROMPTS, strict=False):
        module(mx.array([prompt]), cache=cache.caches())
        cache.end_pass(len(prompt))
    made = []
    batch = BatchCache(caches)
    for step in range(STEPS):
        tokens = mx.array([[13 + step + row] for row in range(rows)])
        if rows == 1:
            found = module(tokens, cache=caches[0].caches())
            caches[0].end_pass(1)
        else:
            found = module(tokens, cache=batch.begin_step())
            batch.end_step()
        made.append(np.array(found[:, -1]))
    return np.stack(made)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_it_is_what_the_way_through_mlx_gives(architecture: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    attend_next = cpu_step.attend_next
    monkeypatch.setattr(cpu_step, "attend_next", lambda *a: (taken.append(a), attend_next(*a))[1])
    found = _decoded(architecture, rows)
    assert taken

    for kind in (AttentionLayer, AttentionRows):
        monkeypatch.setattr(kind, "attend_next", lambda *_: None)
    taken.clear()
    expected = _decoded(architecture, rows)

    assert not taken
    assert np.array_equal(found, expected)
