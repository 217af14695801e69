"""Blocks for the tests: chains of any length, tensors of every dtype, from a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import BASE, ITEM_BYTES, Block, BlockId, BlockTensor
from kvstrata.tiers.block_file import Checksum
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
    """Settings that a test does not care about: no reserve on a machine that others fill, short pauses."""
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


def records_of(tier: Tier, under: bytes = b"") -> list[BlockRecord]:
    """Parents before children."""
    assert isinstance(tier, DiskTier)
    return sorted(tier.index.records(under), key=lambda row: (row.start, row.id.key, row.id.part))


def same(left: Block, right: Block) -> bool:
    """Bit for bit, names and shapes included."""
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
    return isinstance(result, LoadedBlock) and same(result.block, block)


def real_bytes(directory: Path) -> int:
    """What `du` would say; files that vanish meanwhile take nothing."""
    total = 0
    for path in (directory, *directory.rglob("*")):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
