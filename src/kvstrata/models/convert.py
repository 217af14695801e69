"""Turns the default model's GGUF file into an ordinary MLX model folder.

Knows llama.cpp's names and layout for llama models and what SmolLM2's tokenizer was. Weights stay as they are: Q4_1 is
MLX's affine 4-bit format with groups of 32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP_SIZE, BITS = 32, 4
CONTROL_TOKEN = 3  # llama.cpp's type of special tokens
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
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

Metadata = dict[str, Any]


def convert(gguf: Path, folder: Path, advance: Callable[[int], None]) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into `folder`; tells the bytes done."""
    tensors, metadata = _read(gguf)
    config = model_config(metadata)
    weights: dict[str, mx.array] = {}
    for name, array in tensors.items():
        weights[tensor_name(name)] = _converted(name, array, config)
        advance(array.nbytes)
    config["quantization"].update(_other_bits(weights))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", config)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def _read(gguf: Path) -> tuple[dict[str, mx.array], Metadata]:
    # MLX's stubs do not tell the two shapes of mx.load's answer apart.
    return cast("tuple[dict[str, mx.array], Metadata]", mx.load(str(gguf), return_metadata=True))


def tensor_name(name: str) -> str:
    """blk.3.attn_q.scales -> model.layers.3.self_attn.q_proj.scales"""
    module, _, kind = name.rpartition(".")
    if not module.startswith("blk."):
        return f"{OUTER_NAMES[module]}.{kind}"
    _, layer, part = module.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _converted(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    if ".attn_q." in name:
        return _unpermute(array, config["num_attention_heads"])
    if ".attn_k." in name:
        return _unpermute(array, config["num_key_value_heads"])
    # Norms are float32 in GGUF; left so, they would make a GPU compute everything in float32.
    return array.astype(mx.float16) if array.dtype == mx.float32 else array


def _other_bits(weights: dict[str, mx.array]) -> dict[str, dict[str, int]]:
    """Modules that are not packed as most are; this file keeps its embedding at 8 bits."""
    others = {}
    for name, scales in weights.items():
        module = name.removesuffix(".scales")
        if module == name:
            continue
        bits = weights[f"{module}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
        if bits != BITS:
            others[module] = {"group_size": GROUP_SIZE, "bits": bits}
    return others


def _unpermute(array: mx.array, num_heads: int) -> mx.array:
    """llama.cpp interleaves the two halves of each head's rows for its kind of RoPE; MLX wants them apart.

    Rows only, so packed values, scales and biases are all served alike.
    """
    rows, columns = array.shape
    halves = array.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return mx.contiguous(halves.swapaxes(1, 2).reshape(rows, columns))


def model_config(metadata: Metadata) -> dict[str, Any]:
    heads = _number(metadata, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _number(metadata, "llama.embedding_length"),
        "intermediate_size": _number(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(metadata, "llama.attention.head_count_kv"),
        "head_dim": _number(metadata, "llama.embedding_length") // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        "rms_norm_eps": 1e-05,
        # Here and not in `rope_parameters`, where newer transformers put it: mlx-lm reads this one.
        "rope_theta": metadata["llama.rope.freq_base"].item(),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "vocab_size": _number(metadata, "llama.vocab_size"),
        "bos_token_id": _number(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _number(metadata, "tokenizer.ggml.padding_token_id"),
        "quantization": {"group_size": GROUP_SIZE, "bits": BITS},
    }


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE after splitting numbers into digits, which GGUF only hints at (`tokenizer.ggml.pre` = smollm)."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    specials = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _number(metadata, "llama.context_length"),
        "bos_token": tokens[_number(metadata, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_number(metadata, "tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[_number(metadata, "tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[_number(metadata, "tokenizer.ggml.unknown_token_id")],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }


def _number(metadata: Metadata, key: str) -> int:
    return int(metadata[key].item())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
