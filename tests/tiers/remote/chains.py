"""Chains of blocks of 256 tokens as a remote tier names them, and what comes back of them."""

from __future__ import annotations

import numpy as np

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import BASE, CHECKPOINT, Block, BlockId
from kvstrata.tiers.interface import Accepted, ChainLink, MissingChain, TierMatch
from kvstrata.tiers.lookups import run_walk
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock
from kvstrata.tiers.remote.tier import RemoteTier
from tests.tiers.disk.blocks import ROOT, random_tensor

TOKENS = 256


def ids_of(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens, dtype=np.int32)


def block_at(link: ChainLink, root: bytes, ids: np.ndarray, *, part: str = BASE, num_values: int = 24) -> Block:
    generator = np.random.default_rng([*link.key[:8], len(part)])
    tensors = {
        "0.k.high": random_tensor(generator, "U32", (2, num_values)),
        "0.v.scale": random_tensor(generator, "F16", (2, 5)),
    }
    token_ids = ids[link.start : link.end].astype("<i4").tobytes()
    return Block(link.key, link.parent, root, link.start, token_ids, tensors, {"groups": []}, part)


def wanted(tier: RemoteTier, ids: np.ndarray, marks: tuple[int, ...] = (), root: bytes = ROOT) -> MissingChain:
    return run_walk(tier.blocks.missing_chain(root, ids, marks))


def put_chain(tier: RemoteTier, ids: np.ndarray, marks: tuple[int, ...] = (), *, root: bytes = ROOT) -> list[Block]:
    """All that is missing, and waits until it is there. Tells what was put."""
    missing = wanted(tier, ids, marks, root)
    blocks = [block_at(link, missing.root, ids) for link in missing.links]
    blocks += [block_at(link, missing.root, ids, part=CHECKPOINT) for link in missing.marks]
    for block in blocks:
        assert tier.put(block, was_reused=True) == Accepted()
    assert tier.flush(20.0).is_empty
    return blocks


def match_of(tier: RemoteTier, ids: np.ndarray, *, at_marks: bool = False, root: bytes = ROOT) -> TierMatch:
    return run_walk(tier.blocks.longest_chain(root, 0, ids, at_marks=at_marks))


def read_all(tier: RemoteTier, blocks: list[BlockId], root: bytes = ROOT) -> list[LoadedBlock | MissingBlock]:
    came: list[LoadedBlock | MissingBlock] = []
    reading = tier.read(blocks, came.append, root=root)
    assert reading.wait(20.0)
    for each in came:
        each.release()
    return came


def same(a: Block, b: Block) -> bool:
    def bytes_of(block: Block) -> dict:
        return {name: (t.dtype, t.shape, bytes(t.view())) for name, t in block.tensors.items()}

    return (a.id, a.start, a.token_ids, bytes_of(a)) == (b.id, b.start, b.token_ids, bytes_of(b))


__all__ = ["TOKENS", "block_at", "chain", "ids_of", "match_of", "put_chain", "read_all", "same", "wanted"]
