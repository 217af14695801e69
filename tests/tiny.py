"""Tiny random models of the architectures that every cache test runs on. No download: random weights, real layers."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvstrata.kv.layout import Layout, arrays_in
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe

VOCAB = 97

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 32}

_DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}

_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "mlp_only_layers": [], "norm_topk_prob": True},
    "gemma3_text": {"sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 32,
        "sliding_window": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        **_MOE,
        **_DELTA_NET,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {
        **_DELTA_NET,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 32,
        "intermediate_size": 128,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": "auto",
    },
    # Attention and a state side by side in each layer: composite caches.
    "falcon_h1": {
        "num_hidden_layers": 3,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
}

ARCHITECTURES = tuple(_SPECIFIC)

# Reaches into mlx-lm's caches, so it is served with those.
FOREIGN = "deepseek_v32"
# For what is done to weights: keys have a bias, and it is served as llama is.
_SPECIFIC["qwen2"] = {}
_SPECIFIC[FOREIGN] = {**_SPECIFIC["deepseek_v3"], "index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}


def tiny_config(architecture: str) -> dict[str, Any]:
    return {**_COMMON, **_SPECIFIC[architecture], "model_type": architecture}


def tiny_module(architecture: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A float32 model with random weights, the same for the same seed. `overrides` go into its config."""
    arch = importlib.import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(seed)
    model = arch.Model(arch.ModelArgs.from_dict({**tiny_config(architecture), **overrides}))
    model.update(
        tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
    )
    mx.eval(model.parameters())
    return model


@functools.cache
def tiny_loaded(architecture: str, num_layers: int | None = None) -> LoadedModel:
    """Of two layers, as a rule: tests take less time. Some need more, or were made for the bytes of more."""
    config = {**tiny_config(architecture), **({"num_hidden_layers": num_layers} if num_layers else {})}
    module = tiny_module(architecture, **config)
    return LoadedModel(
        name=f"tiny-{architecture}",
        path=Path("nowhere"),
        module=module,
        tokenizer=tiny_tokenizer(),
        config=config,
        context_tokens=_COMMON["max_position_embeddings"],
        vocab_size=VOCAB,
        eos_ids=frozenset(),
        weight_bytes=sum(array.nbytes for array in arrays_in(module.parameters())),
        dtype="float32",
        fingerprint=f"tiny-{architecture}",
    )


def layout_of(loaded: LoadedModel, max_kv_size: int | None = None) -> Layout:
    """Tiny models are probed once: the layout follows from the configuration, not from the weights."""
    architecture, num_layers = loaded.config["model_type"], loaded.config["num_hidden_layers"]
    is_tiny = loaded.config == {**tiny_config(architecture), "num_hidden_layers": num_layers}
    return _tiny_layout(architecture, num_layers, max_kv_size) if is_tiny else probe(loaded.module, max_kv_size)


@functools.cache
def _tiny_layout(architecture: str, num_layers: int, max_kv_size: int | None) -> Layout:
    return probe(tiny_loaded(architecture, num_layers).module, max_kv_size)


def tiny_tokenizer() -> TokenizerWrapper:
    """One printable character for each id."""
    tokenizer = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(VOCAB)}, unk_token=" "))
    tokenizer.decoder = decoders.Fuse()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
