"""A GGUF file becomes an ordinary MLX model folder. Weights stay packed: blocks.py says what each type becomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvstrata.models.gguf import tokenizers
from kvstrata.models.gguf.architectures import FREQUENCIES, Architecture, architecture_of, changed, config_of, name_of
from kvstrata.models.gguf.blocks import GROUP, affine, plain
from kvstrata.models.gguf.container import BadGguf, Gguf, GgufTensor

# Of a file of weights: a converter never holds more than this beside what it reads.
SHARD_BYTES = 1 << 30


def convert(gguf: Gguf, folder: Path, advance: Callable[[int], None]) -> None:
    """Writes config.json, weights and the tokenizer's files into `folder`; tells the bytes done."""
    config, architecture = config_of(gguf), architecture_of(gguf)
    tokenizer = tokenizers.build(gguf)  # first: what it refuses is known in seconds
    names = {tensor.name: named(gguf, architecture, tensor) for tensor in gguf.tensors.values()}
    shards = _Shards(folder)
    bits: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        if tensor.name != FREQUENCIES:
            module, kind = names[tensor.name]
            arrays, num_bits = _converted(architecture, tensor, kind, config)
            shards.add({f"{module}.{name}": array for name, array in arrays.items()})
            if num_bits:
                bits[module] = num_bits
        advance(tensor.nbytes)
    shards.close()
    if bits:
        config["quantization"] = quantization(bits)
    _write_json(folder / "config.json", {**config, **tokenizers.ids_of(gguf)})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizers.tokenizer_config(gguf, config["max_position_embeddings"]))
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def named(gguf: Gguf, architecture: Architecture, tensor: GgufTensor) -> tuple[str, str]:
    if tensor.name == FREQUENCIES:
        return "", ""
    try:
        return name_of(architecture, tensor.name)
    except (KeyError, ValueError) as error:
        what = f"{architecture.mlx} model"
        raise BadGguf(f"{gguf.path} has a tensor {tensor.name!r}, which a {what} of mlx-lm has not.") from error


def _converted(
    architecture: Architecture, tensor: GgufTensor, kind: str, config: dict[str, Any]
) -> tuple[dict[str, mx.array], int]:
    """Its arrays by name, and how many bits its codes have; 0: it is not packed."""
    packed = affine(tensor.kind, tensor.octets, tensor.shape) if len(tensor.shape) > 1 else None
    if packed is None:
        arrays, bits = {kind: plain(tensor.kind, tensor.octets, tensor.shape)}, 0
    else:
        arrays, bits = {"weight": packed.weight, "scales": packed.scales, "biases": packed.biases}, packed.bits
    made = {name: changed(architecture, tensor.name, array, config) for name, array in arrays.items()}
    mx.eval(list(made.values()))
    return made, bits


def quantization(bits: dict[str, int]) -> dict[str, Any]:
    """What most modules have, and those that differ."""
    usual = max(set(bits.values()), key=lambda each: sum(other == each for other in bits.values()))
    others = {module: {"group_size": GROUP, "bits": each} for module, each in bits.items() if each != usual}
    return {"group_size": GROUP, "bits": usual, **others}


class _Shards:
    """Weights in files of a bounded size, and the index that names them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, mx.array] = {}
        self._files: dict[str, str] = {}  # by weight
        self._number = 0

    def add(self, weights: dict[str, mx.array]) -> None:
        self._held |= weights
        if sum(array.nbytes for array in self._held.values()) >= SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        self._number += 1
        name = f"model-{self._number:05}.safetensors"
        mx.save_safetensors(str(self._folder / name), self._held, metadata={"format": "mlx"})
        self._files |= dict.fromkeys(self._held, name)
        self._held = {}

    def close(self) -> None:
        if self._held:
            self._write()
        _write_json(self._folder / "model.safetensors.index.json", {"weight_map": self._files})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
