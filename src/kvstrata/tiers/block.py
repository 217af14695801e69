"""A block: the bytes of at most 256 tokens, and their identity. Knows no files and no MLX arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32

TOKEN_BYTES = 4

BLOCK_TOKENS = 256  # at most

# The parts of a block: the KV of its tokens and, for models that resume at checkpoints, the checkpoint at its end.
BASE = "base"

CHECKPOINT = "mark"

PART_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

# Dtype names of the safetensors format, with the bytes of one element.
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

# (parent key, int32 token ids) -> key. `prefix_cache.keys.chain` is the only definition; it is passed to each tier.
Chain = Callable[[bytes, NDArray[np.int32]], bytes]

# (a block's description, bytes by tensor) -> bytes by label, for people to read. Tiers do not interpret labels.
Tally = Callable[[Mapping[str, Any], Mapping[str, int]], Mapping[str, int]]


def no_tally(_description: Mapping[str, Any], _tensor_bytes: Mapping[str, int]) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True)
class BlockId:
    """A part of a block: its base, or the checkpoint at its end. Each part is written, read and removed by itself."""

    key: bytes
    part: str = BASE

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"A key has {KEY_BYTES} bytes, not {len(self.key)}")
        if not PART_NAME.fullmatch(self.part):
            raise ValueError(f"A part is named by 1 to 32 of a-z 0-9 _ -, not {self.part!r}")


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A tensor. `data` has the buffer protocol, is C-contiguous and little-endian, and is never written to."""

    dtype: str
    shape: tuple[int, ...]
    data: Any

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"Unknown dtype {self.dtype!r}; known: {', '.join(ITEM_BYTES)}")
        if any(size < 0 for size in self.shape) or memoryview(self.data).nbytes != self.nbytes:
            raise ValueError(
                f"{self.dtype} {list(self.shape)} takes {self.nbytes} bytes, not {memoryview(self.data).nbytes}"
            )

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def view(self) -> memoryview:
        # A memoryview without bytes cannot be cast.
        return memoryview(self.data).cast("B") if self.nbytes else memoryview(b"")


@dataclass(frozen=True, slots=True)
class BlockContent:
    """The KV or the checkpoint of a block, without its identity."""

    tensors: Mapping[str, BlockTensor]
    description: Mapping[str, Any]  # JSON; tiers do not interpret it

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Block:
    """A content and its identity."""

    key: bytes  # chain(parent, token_ids)
    parent: bytes
    root: bytes  # identity of the model and the salt
    start: int  # position of the first token in its sequence
    token_ids: bytes  # int32, little-endian
    tensors: Mapping[str, BlockTensor]
    description: Mapping[str, Any]  # JSON; tiers do not interpret it
    part: str = BASE
    # When a request last used its tokens, as far as the caller of `put` knows. Not in the file.
    last_use: float = field(default=math.inf, compare=False)

    def __post_init__(self) -> None:
        BlockId(self.key, self.part)
        if len(self.parent) != KEY_BYTES or len(self.root) != KEY_BYTES:
            raise ValueError(f"Parent and root are keys of {KEY_BYTES} bytes")
        if self.start < 0 or not self.token_ids or len(self.token_ids) % TOKEN_BYTES:
            raise ValueError("A block starts at 0 or later and has one int32 for each of its tokens, at least one")
        if not self.tensors.keys().isdisjoint({"", "__metadata__"}):
            raise ValueError("A tensor has a name, and not __metadata__: the file format keeps that one")

    @property
    def id(self) -> BlockId:
        return BlockId(self.key, self.part)

    @property
    def content(self) -> BlockContent:
        return BlockContent(self.tensors, self.description)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensor_bytes(self) -> dict[str, int]:
        return {name: tensor.nbytes for name, tensor in self.tensors.items()}


def key_of(chain: Chain, parent: bytes, token_ids: bytes) -> bytes:
    return chain(parent, np.frombuffer(token_ids, dtype="<i4").astype(np.int32, copy=False))
