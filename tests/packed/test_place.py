"""A model with packed layers computes what it computed, takes what was foretold, and says what it is."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from kvstrata.errors import ModelError
from kvstrata.models.cpu_form import choose_form, weights_here
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.fingerprint import fingerprint
from kvstrata.packed import block
from kvstrata.packed.block import FusedBlock
from kvstrata.packed.form import DENSE, CpuForm
from kvstrata.packed.place import place, placed_bytes
from tests.tiny import ARCHITECTURES, tiny_module

EXACT = CpuForm(packs=True, plain_bits=None, activations=32)
ROUNDED = CpuForm(packs=True, plain_bits=None, activations=16)
# Every dimension of the tiny models that is quantized is a multiple of 32.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
# Blocks of the common build.
SHORT = {"llama": 4, "qwen2": 4, "qwen3": 4, "gemma3_text": 4}


def quantized_module(architecture: str, *, bits: int = 4, **overrides: Any) -> Any:
    """The same weights each time."""
    model = tiny_module(architecture, **{"num_hidden_layers": 4, **overrides})

    def fits(_: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, group_size=32, bits=bits, class_predicate=fits)
    mx.eval(model.parameters())
    return model


def logits(model: Any, num_tokens: int = 24, fed: int = 4) -> np.ndarray:
    """Of a prompt, then of single tokens."""
    ids = [int(x) for x in np.random.default_rng(3).integers(1, 90, num_tokens + fed)]
    caches = make_prompt_cache(model)
    passes = [ids[:num_tokens], *([each] for each in ids[num_tokens:])]
    return np.concatenate([np.array(model(mx.array([some]), cache=caches)[0]) for some in passes])


def num_short(model: nn.Module) -> int:
    return sum(isinstance(module, FusedBlock) for _, module in model.named_modules())


@pytest.mark.parametrize(("architecture", "is_tried"), [("qwen3_next", False), ("qwen3_5", False), ("qwen3", True)])
def test_queries_that_bring_a_gate_are_not_tried(
    architecture: str, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops check no bounds. They read beyond the heads' norms, and BLAS complained about it on the console."""
    tried: list[nn.Module] = []
    monkeypatch.setattr(block, "_fuse", lambda block, *_: tried.append(block) is not None)
    overrides: dict[str, Any] = {"mlp_only_layers": [0, 1, 2, 3]} if architecture == "qwen3_next" else {}
    place(quantized_module(architecture, **overrides), EXACT)
    assert bool(tried) == is_tried


def held_bytes(model: nn.Module) -> int:
    arrays: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for array in {id(array): array for _, array in arrays}.values())


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
def test_packed_models_compute_what_float32_ones_do(architecture: str) -> None:
    dense, exact, rounded = (quantized_module(architecture) for _ in range(3))
    place(dense, DENSE)
    foretold = placed_bytes(exact, EXACT)
    place(exact, EXACT)
    place(rounded, ROUNDED)
    wanted = logits(dense)
    spread = wanted.std()
    assert np.abs(logits(exact) - wanted).max() <= 2e-4 * spread
    assert np.abs(logits(rounded) - wanted).max() <= 2e-2 * spread
    assert held_bytes(exact) == held_bytes(rounded) == foretold < held_bytes(dense)
    assert num_short(exact) == SHORT.get(architecture, 0)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_other_bits(bits: int) -> None:
    dense, exact = quantized_module("llama", bits=bits), quantized_module("llama", bits=bits)
    place(dense, DENSE)
    place(exact, EXACT)
    wanted = logits(dense)
    assert np.abs(logits(exact) - wanted).max() <= 2e-4 * wanted.std()


def test_greedy_tokens_are_those_of_the_float32_model() -> None:
    models = [quantized_module("qwen2") for _ in range(3)]
    for model, form in zip(models, (DENSE, EXACT, ROUNDED), strict=True):
        place(model, form)
    replies = [_greedy(model, 64) for model in models]
    assert replies[0] == replies[1] == replies[2]


def _greedy(model: Any, count: int) -> list[int]:
    caches, ids = make_prompt_cache(model), [5, 6, 7]
    made: list[int] = []
    for _ in range(count):
        ids = [int(np.argmax(model(mx.array([ids]), cache=caches)[0, -1]))]
        made += ids
    return made


def test_a_block_that_does_something_else_stays_as_it_is() -> None:
    """It is found by trying, whatever it is."""
    plain, other = quantized_module("llama"), quantized_module("llama")
    kind = type(other.layers[0])

    class Halved(kind):
        def __call__(self, *args: Any, **options: Any) -> mx.array:
            return 0.5 * super().__call__(*args, **options)

    class Tilted(type(other.layers[0].input_layernorm)):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) + 0.01

    other.layers[1].__class__ = Halved
    other.layers[2].input_layernorm.__class__ = Tilted
    wanted = quantized_module("llama")
    wanted.layers[1].__class__ = Halved
    wanted.layers[2].input_layernorm.__class__ = Tilted
    place(plain, EXACT)
    place(other, EXACT)
    place(wanted, DENSE)
    assert (num_short(plain), num_short(other)) == (4, 2)
    assert np.abs(logits(other) - logits(wanted)).max() <= 2e-4 * logits(wanted).std()


def test_a_block_that_changes_far_away_stays_as_it_is() -> None:
    other = quantized_module("llama")
    kind = type(other.layers[0].self_attn)

    class Cooled(kind):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return super().__call__(x, mask, cache) * (0.5 if cache.offset > 8192 else 1.0)

    Cooled.__module__ = kind.__module__
    other.layers[0].self_attn.__class__ = Cooled
    place(other, EXACT)
    assert num_short(other) == 3


def test_rows_of_a_batch_turn_by_their_own_offsets() -> None:
    """Also where a cache adds to its offsets in place, and where two prompts have one whole number."""
    from mlx_lm.models.cache import BatchKVCache

    dense, exact = (quantized_module("llama", num_hidden_layers=1) for _ in range(2))
    place(dense, DENSE)
    place(exact, EXACT)
    assert num_short(exact) == 1
    ids = mx.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    for make in (make_prompt_cache, lambda _: [BatchKVCache([0, 2])]):
        logits_of = []
        for model in (dense, exact):
            caches = make(model)
            alone = make_prompt_cache(model)
            made = [model(some, cache=caches) for some in (ids, ids[:, :1], ids[:, 1:2])]
            made += [model(ids[:1, :1], cache=alone), model(ids[:1], cache=alone)]
            logits_of.append(np.concatenate([np.array(each).reshape(-1, 97) for each in made]))
        assert np.abs(logits_of[0] - logits_of[1]).max() <= 2e-4 * logits_of[0].std()


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_blocks_turn_as_their_rope_does(rope: str) -> None:
    scaling: dict[str, Any] = {"rope_type": rope, "factor": 4.0, "original_max_position_embeddings": 64}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    dense, exact = (quantized_module("llama", rope_scaling=scaling) for _ in range(2))
    place(dense, DENSE)
    place(exact, EXACT)
    assert num_short(exact) == 4
    wanted = logits(dense, num_tokens=150)
    assert np.abs(logits(exact, num_tokens=150) - wanted).max() <= 5e-4 * wanted.std()


def test_interleaved_pairs() -> None:
    dense, exact = (quantized_module("llama", rope_traditional=True) for _ in range(2))
    place(dense, DENSE)
    place(exact, EXACT)
    assert num_short(exact) == 4
    assert np.abs(logits(exact) - logits(dense)).max() <= 2e-4 * logits(dense).std()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.03), (4, 0.4)])
def test_plain_weights_are_quantized_where_that_is_asked_for(architecture: str, bits: int, bound: float) -> None:
    dense, packed = (tiny_module(architecture) for _ in range(2))
    packed.set_dtype(mx.bfloat16)
    form = CpuForm(packs=True, plain_bits=bits, activations=16)
    foretold = placed_bytes(packed, form)
    place(packed, form)
    assert held_bytes(packed) == foretold < held_bytes(dense)
    wanted = logits(dense)
    # Not the largest: another expert may be chosen for a token.
    assert np.median(np.abs(logits(packed) - wanted)) <= bound * wanted.std()


def test_what_is_chosen() -> None:
    quantized, sixteen, plain = quantized_module("llama"), tiny_module("llama"), tiny_module("llama")
    sixteen.set_dtype(mx.bfloat16)
    plenty = 1 << 40
    assert choose_form(quantized, CpuOptions(), plenty) == ROUNDED
    assert choose_form(plain, CpuOptions(), plenty) == DENSE
    assert choose_form(sixteen, CpuOptions(), plenty).plain_bits == 8
    assert choose_form(sixteen, CpuOptions("4"), plenty).plain_bits == 4
    assert choose_form(sixteen, CpuOptions("raw"), plenty) == DENSE
    assert choose_form(quantized, CpuOptions(activations=8), plenty).activations == 8


def test_plain_layers_of_a_quantized_model_stay_exact() -> None:
    """Routers, say: they are few, of 16 bits, and were left plain on purpose."""
    model = tiny_module("qwen3_moe")
    nn.quantize(model, group_size=32, bits=4, class_predicate=_fits)
    model.set_dtype(mx.bfloat16)
    assert choose_form(model, CpuOptions(), 1 << 40) == ROUNDED


def _fits(name: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0 and not name.endswith("mlp.gate")


def test_rows_that_fill_no_tile_stay_out_of_short_blocks() -> None:
    """Kernels of blocks write whole tiles: a matrix of 20 rows would be written past its end."""
    narrow = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 20}
    dense, exact = (quantized_module("llama", **narrow) for _ in range(2))
    place(dense, DENSE)
    place(exact, ROUNDED)
    assert num_short(exact) == 0
    assert np.abs(logits(exact) - logits(dense)).max() <= 2e-2 * logits(dense).std()


def test_a_layer_that_stands_in_two_places_is_packed_once() -> None:
    dense, exact = quantized_module("llama"), quantized_module("llama")
    for model in (dense, exact):
        model.layers[1].mlp = model.layers[0].mlp
    wanted = placed_bytes(exact, EXACT)
    place(dense, DENSE)
    place(exact, EXACT)
    assert held_bytes(exact) <= wanted
    assert np.abs(logits(exact) - logits(dense)).max() <= 2e-4 * logits(dense).std()


def test_four_bits_where_eight_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    sixteen = tiny_module("llama")
    sixteen.set_dtype(mx.bfloat16)
    eight, four = (placed_bytes(sixteen, CpuForm(packs=True, plain_bits=bits, activations=16)) for bits in (8, 4))
    assert four < eight
    logging.getLogger("kvstrata").propagate = True
    assert choose_form(sixteen, CpuOptions(), four).plain_bits == 4
    assert "quantized to 4" in caplog.text
    # Neither fits: the check of room tells so, for the form that was wanted.
    assert choose_form(sixteen, CpuOptions(), 0).plain_bits == 8


def test_without_numba_weights_become_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    model = quantized_module("llama")
    assert choose_form(model, CpuOptions(), 1 << 40) == DENSE
    assert weights_here().startswith("become float32")
    with pytest.raises(ModelError, match=r"kvstrata\[cpu\]"):
        choose_form(model, CpuOptions("8"), 1 << 40)


def test_another_form_is_another_model(tmp_path: Path) -> None:
    """Or its blocks on the disk would be taken for those of this one."""
    (tmp_path / "config.json").write_text("{}")
    forms = [DENSE, EXACT, ROUNDED, *(CpuForm(packs=True, plain_bits=bits, activations=16) for bits in (8, 4))]
    assert len({fingerprint(tmp_path, form=form.identity) for form in forms}) == len(forms)
    assert fingerprint(tmp_path, form=DENSE.identity) == fingerprint(tmp_path)
