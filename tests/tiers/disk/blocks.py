"""Blocks from a seed, the files that hold them, and a disk tier with settings for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import BASE, ITEM_BYTES, Block, BlockId, BlockTensor
from kvstrata.tiers.block_file import (
    CHECKSUM_AT,
    CHECKSUM_ENDS,
    LENGTH_BYTES,
    NUM_DIGITS,
    Checksum,
    encode_block,
)
from kvstrata.tiers.disk.folder import file_name
from kvstrata.tiers.disk.index import BlockRecord
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.interface import Accepted, Tier
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock

ROOT = bytes(range(32))
OTHER_ROOT = bytes(range(32, 64))


def random_tensor(generator: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> BlockTensor:
    nbytes = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return BlockTensor(dtype, shape, generator.integers(0, 256, nbytes, dtype=np.uint8).tobytes())


def make_block(
    seed: int = 0,
    *,
    parent: bytes = ROOT,
    root: bytes = ROOT,
    start: int = 0,
    num_tokens: int = 4,
    num_values: int = 24,
    part: str = BASE,
) -> Block:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 50_000, num_tokens, dtype=np.int32)
    tensors = {
        "k.high": random_tensor(generator, "U32", (2, num_values)),
        "k.scale": random_tensor(generator, "F16", (2, 5)),
        "v": random_tensor(generator, "BF16", (1, num_values)),
    }
    return Block(
        key=chain(parent, ids),
        parent=parent,
        root=root,
        start=start,
        token_ids=ids.astype("<i4").tobytes(),
        tensors=tensors,
        description={"codec": "planes:4", "layers": [0, 1]},
        part=part,
    )


def make_chain(
    length: int, *, seed: int = 0, root: bytes = ROOT, num_tokens: int = 4, num_values: int = 24
) -> list[Block]:
    blocks: list[Block] = []
    parent = root
    for index in range(length):
        blocks.append(
            make_block(
                seed * 100_003 + index,
                parent=parent,
                root=root,
                start=index * num_tokens,
                num_tokens=num_tokens,
                num_values=num_values,
            )
        )
        parent = blocks[-1].key
    return blocks


def open_tier(directory: Path, limit_bytes: int = 64 << 20, **settings) -> DiskTier:
    """Open a disk tier without a reserve and with short pauses: other programs fill the volume of a test machine."""
    beside = {
        name: settings.pop(name) for name in ("chain", "tally", "is_pinned", "files", "clock") if name in settings
    }
    defaults = {"reserve_bytes": 0, "first_pause_s": 0.05, "checksum": Checksum.BLAKE3}
    return DiskTier(DiskOptions(directory, limit_bytes, **{**defaults, **settings}), **{"chain": chain, **beside})


def put_all(tier: DiskTier, blocks: list[Block]) -> None:
    for block in blocks:
        assert tier.put(block) == Accepted()
    assert tier.flush(20).is_empty


def read_now(tier: DiskTier, block: BlockId, *, root: bytes) -> LoadedBlock | MissingBlock:
    results: list[LoadedBlock | MissingBlock] = []
    assert tier.read([block], results.append, root=root).wait(60)
    results[0].release()
    return results[0]


def write_blocks(directory: Path, blocks: list[Block], **settings) -> None:
    """Write blocks with a tier that is closed afterwards."""
    tier = open_tier(directory, **settings)
    put_all(tier, blocks)
    tier.close()


def path_of(directory: Path, block: Block | BlockId) -> Path:
    """Return the file of a block, whether it exists or not."""
    block_id = block.id if isinstance(block, Block) else block
    return directory / "blocks" / block_id.key[:1].hex() / file_name(block_id)


def block_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def delete_catalogue(directory: Path) -> None:
    for path in directory.glob("catalogue*"):
        path.unlink()


def content_of(block: Block, checksum: Checksum = Checksum.BLAKE3) -> bytes:
    """Return the bytes of a block file."""
    return b"".join(encode_block(block, checksum).pieces)


def with_header(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a block file with a changed header of the same length and a correct checksum."""
    length = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    fields = json.loads(content[LENGTH_BYTES:length])
    fields["__metadata__"]["checksum"] = "0" * NUM_DIGITS
    change(fields)
    body = json.dumps(fields, separators=(",", ":")).encode().ljust(length - LENGTH_BYTES)
    header = bytearray(content[:LENGTH_BYTES] + body)
    assert len(header) == length
    header[CHECKSUM_AT:CHECKSUM_ENDS] = blake3(bytes(header)).hexdigest().encode()
    return bytes(header) + content[length:]


def records_of(tier: Tier, under: bytes = b"") -> list[BlockRecord]:
    """Return records of the index, parents before children."""
    assert isinstance(tier, DiskTier)
    return sorted(tier.index.records(under), key=lambda row: (row.start, row.id.key, row.id.part))


def are_equal(left: Block, right: Block) -> bool:
    """Whether two blocks have the same fields and the same tensors, bit for bit."""
    return (
        left.id == right.id
        and (left.parent, left.root, left.start) == (right.parent, right.root, right.start)
        and left.token_ids == right.token_ids
        and left.description == right.description
        and left.tensors.keys() == right.tensors.keys()
        and all(
            (a.dtype, a.shape, bytes(a.view())) == (b.dtype, b.shape, bytes(b.view()))
            for a, b in ((left.tensors[name], right.tensors[name]) for name in left.tensors)
        )
    )


def is_same(result: LoadedBlock | MissingBlock, block: Block) -> bool:
    """Whether a read returned this block."""
    return isinstance(result, LoadedBlock) and are_equal(result.block, block)


def all_same(results: Sequence[LoadedBlock | MissingBlock], blocks: Sequence[Block]) -> bool:
    """Whether reads returned these blocks, in this order."""
    return all(is_same(result, block) for result, block in zip(results, blocks, strict=True))


def real_bytes(directory: Path) -> int:
    """Return the allocated bytes of a folder, as `du` counts them; files that vanish meanwhile count 0."""
    total = 0
    for path in (directory, *directory.rglob("*")):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
