"""Architectures: llama.cpp's names of weights and settings, and mlx-lm's names of the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.models.gguf.container import BadGguf, Gguf

Config = dict[str, Any]
Change = Callable[[mx.array, Config], mx.array]

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Tensors that say what the config says.
FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    mlx: str  # mlx-lm's name of it
    layer: Mapping[str, str]
    config: Callable[[GgufSettings], Config] = lambda _: {}
    changes: Mapping[str, Change] = field(default_factory=dict)  # by the last part of llama.cpp's name, without its end


class GgufSettings:
    """Metadata under an architecture's own name."""

    def __init__(self, gguf: Gguf) -> None:
        self._gguf = gguf
        self.architecture = str(gguf.metadata.get("general.architecture"))

    def get(self, key: str, otherwise: Any = None) -> Any:
        return self._gguf.metadata.get(f"{self.architecture}.{key}", otherwise)

    def need(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise BadGguf(f"{self._gguf.path} does not say {self.architecture}.{key}, which the model needs.")
        return found

    @property
    def head_dim(self) -> int:
        shared = self.need("embedding_length") // self.need("attention.head_count")
        return int(self.get("attention.key_length", shared))


def _two_halves(num_heads_key: str) -> Change:
    """llama.cpp interleaves the two halves of each head's rows for its kind of RoPE; MLX wants them apart. Rows only:
    packed values, scales and biases are all served alike."""

    def change(array: mx.array, config: Config) -> mx.array:
        heads, rows = config[num_heads_key], array.shape[0]
        halves = array.reshape(heads, rows // heads // 2, 2, -1)
        return mx.contiguous(halves.swapaxes(1, 2).reshape(array.shape))

    return change


def _less_one(array: mx.array, _config: Config) -> mx.array:
    """Gemma's norms multiply by 1 + weight; llama.cpp stores the sum."""
    return (array.astype(mx.float32) - 1).astype(array.dtype)


def _gemma3(settings: GgufSettings) -> Config:
    head_dim, layers = settings.head_dim, settings.need("block_count")
    # The largest of them divides by the size of its heads in the stream, not by their own.
    scalar = settings.need("embedding_length") // settings.need("attention.head_count") if layers == 62 else head_dim
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": settings.need("attention.sliding_window"),
        "sliding_window_pattern": 6,
    }


ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        LAYER,
        changes={"attn_q": _two_halves("num_attention_heads"), "attn_k": _two_halves("num_key_value_heads")},
    ),
    "qwen2": Architecture("qwen2", LAYER),
    "qwen3": Architecture("qwen3", {**LAYER, **HEAD_NORMS}),
    "gemma3": Architecture(
        "gemma3_text",
        {
            **LAYER,
            **HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_gemma3,
        changes=dict.fromkeys(
            (
                *("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
                *("attn_q_norm", "attn_k_norm", "output_norm"),
            ),
            _less_one,
        ),
    ),
}


def architecture_of(gguf: Gguf) -> Architecture:
    name = gguf.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise BadGguf(f"{gguf.path} is a model of architecture {name!r}; kvstrata converts {known}.")
    return ARCHITECTURES[name]


def name_of(architecture: Architecture, name: str) -> tuple[str, str]:
    """Return mlx-lm's module and kind: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj, weight.

    Raises KeyError for an unknown tensor."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("blk."):
        return OUTER[module], kind
    _, layer, part = module.split(".")
    return f"model.layers.{layer}.{architecture.layer[part]}", kind


def changed(architecture: Architecture, name: str, array: mx.array, config: Config) -> mx.array:
    part = name.rpartition(".")[0].rpartition(".")[2]
    change = architecture.changes.get(part)
    return array if change is None else change(array, config)


def config_of(gguf: Gguf) -> Config:
    try:
        return _config_of(gguf)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise BadGguf(f"The settings in {gguf.path} make no sense: {error}. Get it again") from error


def _config_of(gguf: Gguf) -> Config:
    architecture, settings = architecture_of(gguf), GgufSettings(gguf)
    heads = settings.need("attention.head_count")
    config = {
        "model_type": architecture.mlx,
        "hidden_size": settings.need("embedding_length"),
        "intermediate_size": settings.need("feed_forward_length"),
        "num_hidden_layers": settings.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("attention.head_count_kv", heads),
        "head_dim": settings.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": settings.need("context_length"),
        "rms_norm_eps": float(f"{settings.need('attention.layer_norm_rms_epsilon'):.6g}"),  # it was float32
        # Here and not in `rope_parameters`, where newer transformers put it: mlx-lm reads this one.
        "rope_theta": settings.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float16",
        # Older ones have a tokenizer of Mistral's that transformers warns of.
        "transformers_version": "5.0.0",
        "vocab_size": _vocab_size(gguf),
    }
    scaling = _rope_scaling(gguf, settings, config)
    return {**config, **({"rope_scaling": scaling} if scaling else {}), **architecture.config(settings)}


def _vocab_size(gguf: Gguf) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise BadGguf(f"{gguf.path} has no token embeddings.")
    return embedding.shape[0]


def _rope_scaling(gguf: Gguf, settings: GgufSettings, config: Config) -> Config | None:
    kind, factor = settings.get("rope.scaling.type"), settings.get("rope.scaling.factor")
    if FREQUENCIES in gguf.tensors:
        return _llama3_scaling(gguf, config)
    if kind in (None, "none") or factor in (None, 1.0):
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if kind == "yarn":
        original = settings.need("rope.scaling.original_context_length")
        return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise BadGguf(f"{gguf.path} scales its positions by {kind!r}; kvstrata knows linear, yarn and Llama 3's.")


def _llama3_scaling(gguf: Gguf, config: Config) -> Config:
    """Llama 3's, which GGUF writes down as one divisor for each frequency."""
    divisors = gguf.tensors[FREQUENCIES].octets.view("<f4")
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(divisors, llama3_divisors(scaling, config["rope_theta"], len(divisors)), rtol=1e-3):
        raise BadGguf(
            f"{gguf.path} scales its frequencies in a way that is not Llama 3's, the one that kvstrata knows."
        )
    return scaling


def llama3_divisors(scaling: Config, theta: float, num_pairs: int) -> np.ndarray:
    """Return the divisor of each frequency: 1 where waves are short, `factor` where they are long."""
    waves = 2 * np.pi * theta ** (np.arange(num_pairs) / num_pairs)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
