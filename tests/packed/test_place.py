"""Models with packed layers: their outputs and their memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvstrata.packed.form import DENSE, CpuForm
from kvstrata.packed.place import place, placed_bytes
from tests.packed.models import EXACT, ROUNDED, held_bytes, logits, num_fused, quantized_model
from tests.support.models import ARCHITECTURES, tiny_module

# Blocks of the common build.
NUM_FUSED = {"llama": 4, "qwen2": 4, "qwen3": 4, "gemma3_text": 4}


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
def test_place_keeps_logits_and_predicts_bytes(architecture: str) -> None:
    dense, exact, rounded = (quantized_model(architecture) for _ in range(3))
    place(dense, DENSE)
    predicted = placed_bytes(exact, EXACT)
    place(exact, EXACT)
    place(rounded, ROUNDED)
    expected = logits(dense)
    scale = expected.std()
    assert np.abs(logits(exact) - expected).max() <= 2e-4 * scale
    assert np.abs(logits(rounded) - expected).max() <= 2e-2 * scale
    assert held_bytes(exact) == held_bytes(rounded) == predicted < held_bytes(dense)
    assert num_fused(exact) == NUM_FUSED.get(architecture, 0)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_place_keeps_logits_at_each_bit_width(bits: int) -> None:
    dense, exact = quantized_model("llama", bits=bits), quantized_model("llama", bits=bits)
    place(dense, DENSE)
    place(exact, EXACT)
    expected = logits(dense)
    assert np.abs(logits(exact) - expected).max() <= 2e-4 * expected.std()


def test_place_keeps_greedy_tokens() -> None:
    models = [quantized_model("qwen2") for _ in range(3)]
    for model, form in zip(models, (DENSE, EXACT, ROUNDED), strict=True):
        place(model, form)
    replies = [_greedy(model, 64) for model in models]
    assert replies[0] == replies[1] == replies[2]


def _greedy(model: Any, count: int) -> list[int]:
    caches, ids = make_prompt_cache(model), [5, 6, 7]
    tokens: list[int] = []
    for _ in range(count):
        ids = [int(np.argmax(model(mx.array([ids]), cache=caches)[0, -1]))]
        tokens += ids
    return tokens


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.03), (4, 0.4)])
def test_place_quantizes_plain_weights_on_request(architecture: str, bits: int, bound: float) -> None:
    dense, packed = (tiny_module(architecture) for _ in range(2))
    packed.set_dtype(mx.bfloat16)
    form = CpuForm(packs=True, plain_bits=bits, activations=16)
    predicted = placed_bytes(packed, form)
    place(packed, form)
    assert held_bytes(packed) == predicted < held_bytes(dense)
    expected = logits(dense)
    # Not the largest difference: a token may take another expert.
    assert np.median(np.abs(logits(packed) - expected)) <= bound * expected.std()


def test_place_packs_a_shared_layer_once() -> None:
    dense, exact = quantized_model("llama"), quantized_model("llama")
    for model in (dense, exact):
        model.layers[1].mlp = model.layers[0].mlp
    expected = placed_bytes(exact, EXACT)
    place(dense, DENSE)
    place(exact, EXACT)
    assert held_bytes(exact) <= expected
    assert np.abs(logits(exact) - logits(dense)).max() <= 2e-4 * logits(dense).std()
