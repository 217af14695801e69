"""`NoTier`: it answers every call at once and holds nothing."""

from __future__ import annotations

import numpy as np

from kvstrata.tiers.interface import NoTier, Refused, Removed, Tier, TierMatch, Usage
from kvstrata.tiers.lookups import run_walk
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock, MissReason
from tests.tiers.disk.blocks import ROOT, make_block

IDS = np.arange(4, dtype=np.int32)


def test_no_tier_finds_nothing_and_refuses_blocks() -> None:
    tier: Tier = NoTier()
    block = make_block()
    refused = tier.put(block)
    assert isinstance(refused, Refused)
    assert not tier.write_state().would_take(refused)
    assert not tier.write_state().is_working(60)
    assert not tier.blocks.find(block.key)
    assert run_walk(tier.blocks.longest_chain(ROOT, 0, IDS)) == TierMatch()
    assert tier.clear() == tier.remove([block.id]) == Removed()
    assert tier.flush(0).is_empty
    assert tier.usage() == Usage()
    tier.close()


def test_no_tier_answers_reads_and_lookups_at_once() -> None:
    tier, block, results = NoTier(), make_block(), list[LoadedBlock | MissingBlock]()
    assert tier.read([block.id], results.append, root=ROOT).wait(0)
    assert results == [MissingBlock(block.id, MissReason.ABSENT)]
    lookup = tier.start_lookup(tier.blocks.longest_chain(ROOT, 0, IDS), TierMatch(mark_bytes=1), lambda: None)
    assert lookup.is_done
    assert lookup.answer == TierMatch(mark_bytes=1)
