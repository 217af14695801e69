"""The folder that a GGUF file would become, without its weights: a config, and files of holes with true headers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstrata.models.gguf.architectures import FREQUENCIES, architecture_of, config_of
from kvstrata.models.gguf.blocks import BLOCKS, GROUP, codes_of
from kvstrata.models.gguf.container import Gguf, GgufTensor
from kvstrata.models.gguf.convert import named, quantization

ITEM_BYTES = {"U32": 4, "F16": 2, "BF16": 2}
WORD_BITS = 32


class Hole(NamedTuple):
    """A tensor that is not there: its name ends, what it would be made of."""

    kind: str
    dtype: str
    shape: tuple[int, ...]


def write_outline(gguf: Gguf, folder: Path) -> None:
    """config.json and model.safetensors. The latter takes no room on a file system that knows holes."""
    config, architecture = config_of(gguf), architecture_of(gguf)
    header: dict[str, Any] = {}
    bits: dict[str, int] = {}
    end = 0
    for tensor in gguf.tensors.values():
        if tensor.name == FREQUENCIES:
            continue
        module, kind = named(gguf, architecture, tensor)
        num_bits = _bits(tensor)
        if num_bits:
            bits[module] = num_bits
        for hole in _holes(tensor, kind, num_bits):
            start, end = end, end + math.prod(hole.shape) * ITEM_BYTES[hole.dtype]
            header[f"{module}.{hole.kind}"] = {"dtype": hole.dtype, "shape": hole.shape, "data_offsets": [start, end]}
    if bits:
        config["quantization"] = quantization(bits)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _bits(tensor: GgufTensor) -> int:
    """Of its codes once it is converted; 0: it is not packed. A block of zeros tells."""
    block = next(each for each in BLOCKS.values() if each.name == tensor.kind)
    found = codes_of(tensor.kind, np.zeros(block.num_bytes, np.uint8)) if len(tensor.shape) > 1 else None
    return 0 if found is None else found.bits


def _holes(tensor: GgufTensor, kind: str, num_bits: int) -> Iterator[Hole]:
    if not num_bits:
        yield Hole(kind, "BF16" if tensor.kind == "BF16" else "F16", tensor.shape)
        return
    *rows, width = tensor.shape
    yield Hole("weight", "U32", (*rows, width * num_bits // WORD_BITS))
    for name in ("scales", "biases"):
        yield Hole(name, "F16", (*rows, width // GROUP))
