"""Chains of 256-token blocks on a remote tier: write, look up, read."""

from __future__ import annotations

import numpy as np

from kvstrata.tiers.block import BASE, CHECKPOINT, Block, BlockId
from kvstrata.tiers.interface import Accepted, ChainLink, MissingChain, TierMatch
from kvstrata.tiers.lookups import run_walk
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock
from kvstrata.tiers.remote.tier import RemoteTier
from tests.tiers.disk.blocks import ROOT, random_tensor


def random_ids(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens, dtype=np.int32)


def block_at(link: ChainLink, root: bytes, ids: np.ndarray, *, part: str = BASE, num_values: int = 24) -> Block:
    generator = np.random.default_rng([*link.key[:8], len(part)])
    tensors = {
        "0.k.high": random_tensor(generator, "U32", (2, num_values)),
        "0.v.scale": random_tensor(generator, "F16", (2, 5)),
    }
    token_ids = ids[link.start : link.end].astype("<i4").tobytes()
    return Block(link.key, link.parent, root, link.start, token_ids, tensors, {"groups": []}, part)


def missing_chain(tier: RemoteTier, ids: np.ndarray, marks: tuple[int, ...] = (), root: bytes = ROOT) -> MissingChain:
    return run_walk(tier.blocks.missing_chain(root, ids, marks))


def put_chain(tier: RemoteTier, ids: np.ndarray, marks: tuple[int, ...] = (), *, root: bytes = ROOT) -> list[Block]:
    """Write the missing blocks of a prompt, wait until they are written, and return them."""
    missing = missing_chain(tier, ids, marks, root)
    blocks = [block_at(link, missing.root, ids) for link in missing.links]
    blocks += [block_at(link, missing.root, ids, part=CHECKPOINT) for link in missing.marks]
    for block in blocks:
        assert tier.put(block) == Accepted()
    assert tier.flush(20.0).is_empty
    return blocks


def longest_chain(tier: RemoteTier, ids: np.ndarray, *, at_marks: bool = False, root: bytes = ROOT) -> TierMatch:
    return run_walk(tier.blocks.longest_chain(root, 0, ids, at_marks=at_marks))


def read_all(tier: RemoteTier, blocks: list[BlockId], root: bytes = ROOT) -> list[LoadedBlock | MissingBlock]:
    came: list[LoadedBlock | MissingBlock] = []
    reading = tier.read(blocks, came.append, root=root)
    assert reading.wait(20.0)
    for each in came:
        each.release()
    return came
