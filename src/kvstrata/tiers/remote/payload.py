"""The encoding of a block as one run of bytes. Knows no stores and no seals.

8 bytes have the length of the header, which is JSON. After the header, at a multiple of 64, come the tensors one after
the other, wide elements first. The header has all other fields of a block: key, part, parent, root, start, token ids
and description.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from kvstrata.tiers.block import ITEM_BYTES, Block, BlockId, BlockTensor, Chain, key_of
from kvstrata.tiers.remote.health import Damage, DamagedBlock

LENGTH_BYTES = 8

ALIGNMENT_BYTES = 64

LARGEST_HEADER_BYTES = 4 << 20


def encode(block: Block) -> bytearray:
    names = sorted(block.tensors, key=lambda name: (-ITEM_BYTES[block.tensors[name].dtype], name))
    header = json.dumps(
        {
            "key": block.key.hex(),
            "part": block.part,
            "parent": block.parent.hex(),
            "root": block.root.hex(),
            "start": block.start,
            "token_ids": base64.b64encode(block.token_ids).decode(),
            "description": block.description,
            "tensors": [[name, block.tensors[name].dtype, list(block.tensors[name].shape)] for name in names],
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
    at = _begin(len(header))
    out = bytearray(at + block.nbytes)
    out[:LENGTH_BYTES] = len(header).to_bytes(LENGTH_BYTES, "little")
    out[LENGTH_BYTES : LENGTH_BYTES + len(header)] = header
    for name in names:
        view = block.tensors[name].view()
        out[at : at + view.nbytes] = view
        at += view.nbytes
    return out


def decode(body: memoryview, wanted: BlockId | None, root: bytes | None, chain: Chain) -> Block:
    """Decode a block. Raises DamagedBlock if it is not the wanted one; None: any block, to check a whole store."""
    try:
        block = _read(body)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DamagedBlock(Damage.HEADER, f"the header makes no sense: {error!r}") from error
    if wanted is not None and block.id != wanted:
        raise DamagedBlock(Damage.KEY, "another block than its name says")
    if root is not None and block.root != root:
        raise DamagedBlock(Damage.ROOT, "the block belongs to another model or salt")
    if key_of(chain, block.parent, block.token_ids) != block.key:
        raise DamagedBlock(Damage.KEY, "the token ids do not give the key")
    return block


def _read(body: memoryview) -> Block:
    length = int.from_bytes(body[:LENGTH_BYTES], "little")
    if not 0 < length <= min(LARGEST_HEADER_BYTES, len(body) - LENGTH_BYTES):
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, Any] = json.loads(bytes(body[LENGTH_BYTES : LENGTH_BYTES + length]))
    at = _begin(length)
    tensors: dict[str, BlockTensor] = {}
    for name, dtype, shape in header["tensors"]:
        nbytes = ITEM_BYTES[dtype]
        for size in shape:
            nbytes *= size
        tensors[name] = BlockTensor(dtype, tuple(shape), body[at : at + nbytes])
        at += nbytes
    if at != len(body):
        raise ValueError(f"{len(body)} bytes instead of {at}")
    return Block(
        key=bytes.fromhex(header["key"]),
        parent=bytes.fromhex(header["parent"]),
        root=bytes.fromhex(header["root"]),
        start=int(header["start"]),
        token_ids=base64.b64decode(header["token_ids"], validate=True),
        tensors=tensors,
        description=header["description"],
        part=header["part"],
    )


def _begin(header_bytes: int) -> int:
    """Return the offset of the first tensor."""
    return -(-(LENGTH_BYTES + header_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
