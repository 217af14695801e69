"""How keys turn is found on the model itself: which layers, which dims, how fast."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.models.probe import probe
from kvstrata.models.rope_probe import POSITIONS, turned, with_rotations
from tests.support.models import ARCHITECTURES, tiny_module

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "vocab_size": 64,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

COHERE = {"logit_scale": 1.0, "attention_bias": False, "layer_norm_bias": False, "use_qk_norm": False}

LATENT = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}

MLA_YARN = {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7}

# First dim, pairs, and whether a pair are neighbours; of each layer, None for those without RoPE.
HALVES, NEIGHBOURS = (0, 8, False), (0, 8, True)


def a_model(name: str, **changes: Any) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **COMMON, **changes}))
    mx.eval(model.parameters())
    return model


def described(layout: Layout) -> list[tuple[int, int, bool] | None]:
    turns = [spec.k_rotation or spec.v_rotation for spec in layout.flat()]
    return [turn and (turn.first, turn.num_pairs, turn.is_interleaved) for turn in turns]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen2", {}, [HALVES] * 4),
        ("qwen2", {"rope_scaling": YARN}, [HALVES] * 4),
        ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1024}}, [HALVES] * 4),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, [HALVES] * 4),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, [HALVES] * 4),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, [HALVES, None] * 2),
        ("cohere", COHERE, [NEIGHBOURS] * 4),
        ("cohere2", {**COHERE, "sliding_window": 64, "sliding_window_pattern": 2}, [NEIGHBOURS, None] * 2),
        ("glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}, [(0, 4, True)] * 4),
        ("phi", {"partial_rotary_factor": 0.5}, [(0, 4, False)] * 4),
        ("deepseek_v2", {**LATENT, "rope_scaling": MLA_YARN, "n_routed_experts": None}, [(16, 8, True)] * 4),
    ],
)
def test_each_kind_of_rope(name: str, changes: dict[str, Any], expected: list[Any]) -> None:
    layout = probe(a_model(name, **changes))
    assert described(layout) == expected
    assert not any(spec.rotation_reason for spec in layout.flat())


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((architecture, mx.float32) for architecture in ARCHITECTURES),
        *((architecture, mx.bfloat16) for architecture in ("llama", "gemma3_text", "gemma4_text", "falcon_h1")),
    ],
)
def test_every_layer_of_the_tiny_models_is_known(architecture: str, dtype: mx.Dtype) -> None:
    model = tiny_module(architecture)
    model.set_dtype(dtype)
    layout = probe(model)
    for spec in layout.flat():
        has_keys = spec.kind in ("full", "window", "chunked")
        assert not spec.rotation_reason
        assert (spec.k_rotation is not None or spec.v_rotation is not None) == has_keys


def test_two_bases_in_one_model() -> None:
    local, full, *_ = probe(tiny_module("gemma3_text", rope_theta=1e6)).flat()
    assert (local.kind, full.kind) == ("window", "full")
    assert local.k_rotation is not None
    assert full.k_rotation is not None
    assert local.k_rotation.frequencies != full.k_rotation.frequencies


def test_a_ring_of_bounded_sequences_turns_too() -> None:
    layout = probe(tiny_module("llama"), max_kv_size=64)
    assert {spec.kind for spec in layout.flat()} == {"window"}
    assert described(layout) == [HALVES] * len(layout.layers)


class OddRope:
    """Turns by angles that no module says."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        return self._module(x, offset=3 * offset)


def test_a_layer_that_turns_in_its_own_way_keeps_plain_means() -> None:
    model = tiny_module("llama")
    model.layers[1].self_attn.rope = OddRope(model.layers[1].self_attn.rope)
    layout = probe(model)
    assert described(layout) == [HALVES, None, *[HALVES] * (len(layout.layers) - 2)]
    reason = layout.flat()[1].rotation_reason
    assert layout.describe_rope()["plain_because"] == {reason: [1]}
    assert "like no RoPE module" in reason


def test_a_model_that_cannot_be_asked_keeps_plain_means() -> None:
    layout = probe(tiny_module("llama"))

    class Stubborn:
        layers = tiny_module("llama").layers

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("no caches of this kind")

    found = with_rotations(Stubborn(), dataclasses.replace(layout, layers=(LayerSpec("full"),) * len(layout.layers)))
    assert all("no caches of this kind" in spec.rotation_reason for spec in found.flat())
    assert found.describe_rope()["rope_aware_layers"] == 0


def test_turned_is_what_the_module_does() -> None:
    model = tiny_module("llama")
    spec = probe(model).flat()[0]
    x = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    for position in POSITIONS:
        found = np.asarray(model.layers[0].self_attn.rope(mx.array(x)[None, :, None], offset=position))[0, :, 0]
        np.testing.assert_allclose(turned(x, position, spec.k_rotation), found, atol=1e-4)
