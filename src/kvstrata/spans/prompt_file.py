"""What mlx-lm's files of prompt caches are made of: the names of their tensors, and which of them stand for numbers.

A file has metadata ("0."), the class of each layer's cache ("1."), and which tensors are no tensors ("2."). Only the
classes that are named here are known, and no code of mlx-lm's runs on what a file says. Knows no files and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.codecs.base import MismatchedPlanes
from kvstrata.layers.kinds import LayerSpec, Layout

# Beside mlx-lm's own metadata: the tokens, base64 of int32, little-endian.
TOKENS = "kvstrata_tokens"
KINDS: Mapping[str, tuple[str, ...]] = {
    "full": ("KVCache", "QuantizedKVCache"),
    "window": ("RotatingKVCache",),
    "chunked": ("ChunkedKVCache",),
    "recurrent": ("ArraysCache",),
}
COMPOSITE = "CacheList"
OTHER_VERSION = "It was written by another version of mlx-lm, or by another program"
MAX_SCALARS = 1 << 16


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    dtype: str
    shape: tuple[int, ...]


Leaf = Stored | int | str | None
Tree = Any  # lists and tuples of leaves, as mlx-lm's caches give their state


@dataclass(frozen=True)
class LayerFile:
    """One flat layer in a file: the class of its cache, and where its state begins."""

    cache: str
    path: str


def metadata_of(names: Sequence[str], trees: Sequence[Tree], own: Mapping[str, str]) -> dict[str, str]:
    """All that a file says beside its tensors."""
    scalars = [(path, _kind(leaf)) for path, leaf in flattened(list(trees)) if not isinstance(leaf, Stored)]
    metadata = {f"0.{name}": text for name, text in own.items()}
    metadata |= {f"1.{i}": name for i, name in enumerate(names)}
    metadata["2.0"] = ""
    for number, (path, kind) in enumerate(scalars, 1):
        metadata |= {f"2.{number}.0": path, f"2.{number}.1": kind}
    return metadata


def flattened(tree: Tree, path: str = "") -> Iterator[tuple[str, Leaf]]:
    if isinstance(tree, list | tuple):
        for i, child in enumerate(tree):
            yield from flattened(child, f"{path}.{i}" if path else str(i))
    else:
        yield path, tree


def _kind(leaf: Leaf) -> str:
    if leaf is None:
        return "none"
    return "string" if isinstance(leaf, str) else "scalar"


@dataclass(frozen=True)
class Scalars:
    """The tensors of a file that stand for something else. `number` and `text` read a tensor."""

    kinds: Mapping[str, str]
    number: Callable[[str], int]
    text: Callable[[str], str]

    def int_at(self, path: str) -> int:
        if self.kinds.get(path) != "scalar":
            raise MismatchedPlanes(f"{OTHER_VERSION}: there is no number at {path[:40]}.")
        return self.number(path)

    def is_none(self, path: str) -> bool:
        return self.kinds.get(path) == "none"


def scalar_kinds(metadata: Mapping[str, str]) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for number in range(1, MAX_SCALARS):
        path, kind = metadata.get(f"2.{number}.0"), metadata.get(f"2.{number}.1")
        if path is None or kind is None:
            break
        kinds[path] = kind
    return kinds


def layers_in(layout: Layout, metadata: Mapping[str, str], scalars: Scalars) -> list[LayerFile]:
    """By flat layer. Raises MismatchedPlanes where the file is not of this model."""
    num_layers = sum(1 for i in range(len(layout.layers) + 1) if f"1.{i}" in metadata)
    if num_layers != len(layout.layers):
        words = "no layers that can be read" if not num_layers else f"{num_layers} layers or more"
        raise MismatchedPlanes(f"The file has {words}, this model {len(layout.layers)}.")
    found: list[LayerFile] = []
    for i, spec in enumerate(layout.layers):
        name = metadata[f"1.{i}"]
        if not spec.children:
            found.append(_layer(spec, name, str(i)))
        elif name != COMPOSITE:
            raise MismatchedPlanes(f"Layer {i} consists of several caches here, and of one in the file.")
        else:
            for j, child in enumerate(spec.children):
                found.append(_layer(child, scalars.text(f"{i}.{j}.1"), f"{i}.{j}.0"))
    return found


def _layer(spec: LayerSpec, name: str, path: str) -> LayerFile:
    allowed = KINDS.get(spec.kind, ())
    if name not in allowed:
        raise MismatchedPlanes(f"Layer {path} is of kind {spec.kind}: no {name[:40]!r} can be taken there.")
    return LayerFile(name, path)
