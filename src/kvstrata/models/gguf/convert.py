"""Conversion of a GGUF file: to an ordinary MLX model folder, or to its outline without weights.

Weights stay packed: `tensor_types` says what each type becomes. A folder is converted when it is first asked for, and
found again after that.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.errors import ModelError
from kvstrata.models.download import bar, say
from kvstrata.models.folder import check_disk, damage_of, make_folder
from kvstrata.models.gguf import tokenizers
from kvstrata.models.gguf.architectures import FREQUENCIES, Architecture, architecture_of, changed, config_of, name_of
from kvstrata.models.gguf.container import BadGguf, Gguf, GgufTensor, parts_of, read
from kvstrata.models.gguf.tensor_types import BLOCKS, GROUP, affine, codes_of, plain
from kvstrata.platform.files import cache_root

# Size of a file of weights: the converter holds at most this beside the tensor that it reads.
SHARD_BYTES = 1 << 30
FORMAT = 1  # of the converted folder: raise it when the converter writes something else
# Largest size of a folder as a share of its file: scales of K types grow from 6 bits to 16.
LARGEST_SHARE = 1.4
ITEM_BYTES = {"U32": 4, "F16": 2, "BF16": 2}
WORD_BITS = 32


def convert(gguf: Gguf, folder: Path, advance: Callable[[int], None]) -> None:
    """Write config.json, weights and the tokenizer's files into `folder`. `advance` gets the bytes done."""
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
    """Return the arrays of a tensor by name, and the bits of its codes; 0: not packed."""
    packed = affine(tensor.kind, tensor.octets, tensor.shape) if len(tensor.shape) > 1 else None
    if packed is None:
        arrays, bits = {kind: plain(tensor.kind, tensor.octets, tensor.shape)}, 0
    else:
        arrays, bits = {"weight": packed.weight, "scales": packed.scales, "biases": packed.biases}, packed.bits
    made = {name: changed(architecture, tensor.name, array, config) for name, array in arrays.items()}
    mx.eval(list(made.values()))
    return made, bits


def quantization(bits: dict[str, int]) -> dict[str, Any]:
    """Return mlx-lm's quantization config: the most frequent bits, and the modules that have others."""
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


def folder_of(path: Path) -> Path:
    """Return the folder of a GGUF file; converts the file if that was not done before.

    Raises ModelError, before anything is written, for a file that cannot be read or converted."""
    made_from = _made_from(path)
    folder = _place(path, made_from)
    damage = damage_of(folder, made_from)
    if not damage:
        return folder
    if folder.exists():
        say(f"{folder} will be made again: {damage}")
    gguf = read(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_disk(folder.parent, int(LARGEST_SHARE * gguf.nbytes), path.name)

    def make(_making: Path, made: Path) -> None:
        with bar(f"Converting {path.name}", gguf.nbytes) as advance:
            convert(gguf, made, advance)

    make_folder(folder, made_from, path.name, make)
    return folder


def converted(path: Path) -> Path | None:
    """Return the folder of a GGUF file that was converted before."""
    made_from = _made_from(path)
    folder = _place(path, made_from)
    return None if damage_of(folder, made_from) else folder


def _place(path: Path, made_from: dict[str, Any]) -> Path:
    digest = hashlib.blake2s(repr(sorted(made_from.items())).encode(), digest_size=6).hexdigest()
    return cache_root() / "models" / "gguf" / f"{path.stem}-{digest}"


def _made_from(path: Path) -> dict[str, Any]:
    """Return names, sizes and times of the files: a moved file stays the same, a rewritten one does not."""
    if not path.is_file():
        raise ModelError(f"There is no file {path}. Check the path.")
    files = [(part.name, part.stat()) for part in parts_of(path)]
    return {"format": FORMAT, "gguf": [[name, status.st_size, status.st_mtime_ns] for name, status in files]}


class Hole(NamedTuple):
    """Header of a tensor without data."""

    kind: str  # end of its name
    dtype: str
    shape: tuple[int, ...]


def write_outline(gguf: Gguf, folder: Path) -> None:
    """Write config.json and a model.safetensors of true headers, whose data is a hole in the file."""
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
    """Return the bits of a tensor's codes after conversion; 0: not packed. Found by converting a block of zeros."""
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
