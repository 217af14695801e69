"""GGUF files for tests, written with llama.cpp's own package: tiny models under llama.cpp's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from mlx.utils import tree_flatten

from kvstrata.models.gguf.architectures import ARCHITECTURES, OUTER

VOCAB = 64
TOKENS = ["<s>", "</s>", "<unk>", *(chr(ord("!") + i) for i in range(VOCAB - 4)), "AB"]


def write_gguf(
    path: Path, architecture: str, model: Any, config: dict[str, Any], kind: str = "F32", **changes: Any
) -> Path:
    """Matrices of this kind, the rest in float32. `changes` overwrite metadata; None leaves an entry out."""
    writer = GGUFWriter(path, architecture)
    settings: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": 4096,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config.get("rope_theta", 10_000.0),
    }
    if architecture == "gemma3":
        settings["attention.sliding_window"] = config["sliding_window"]
    entries: dict[str, Any] = {f"{architecture}.{key}": value for key, value in settings.items()}
    entries |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 2, *[1] * (VOCAB - 3)],
        "tokenizer.ggml.merges": ["A B"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    for key, value in (entries | changes).items():
        _add(writer, key, value)
    for name, array in tensors_of(architecture, model, config).items():
        if kind == "F32" or array.ndim < 2:
            writer.add_tensor(name, array)
        else:
            packed = GGMLQuantizationType[kind]
            writer.add_tensor(name, quants.quantize(np.ascontiguousarray(array), packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def tensors_of(architecture: str, model: Any, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A model's weights as llama.cpp's converter would write them."""
    layer = {ours: theirs for theirs, ours in ARCHITECTURES[architecture].layer.items()}
    outer = {ours: theirs for theirs, ours in OUTER.items()}
    found = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, array in parameters:
        module, _, kind = name.rpartition(".")
        if module in outer:
            theirs = f"{outer[module]}.{kind}"
        else:
            _, _, number, part = module.split(".", 3)
            theirs = f"blk.{number}.{layer[part]}.{kind}"
        found[theirs] = _as_theirs(architecture, theirs, np.array(array.astype(mx.float32)), config)
    return found


def _as_theirs(architecture: str, name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if architecture == "gemma3" and "norm" in name:
        return array + 1
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = name.split(".")[-2]
    if architecture == "llama" and part in heads:
        halves = array.reshape(config[heads[part]], 2, -1, *array.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    return array
