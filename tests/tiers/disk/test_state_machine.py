"""The disk tier against a plain dict, under any sequence of puts, reads, removals, damage and restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.tiers.block import Block, BlockId
from kvstrata.tiers.interface import Accepted
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock
from tests.tiers.disk.blocks import OTHER_ROOT, ROOT, is_same, make_chain, open_tier, path_of, read_now, real_bytes
from tests.tiers.disk.faults import flip

OURS, THEIRS = make_chain(4), make_chain(3, seed=5, root=OTHER_ROOT)
MARKS = [Block(b.key, b.parent, b.root, b.start, b.token_ids, b.tensors, {}, part="mark") for b in OURS[:2]]
BLOCKS = [*OURS, *THEIRS, *MARKS]
some_block = st.sampled_from(BLOCKS)


class TierAgainstMemory(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp()) / "cache"
        self.tier = open_tier(self.directory)
        self.expected: dict[BlockId, Block] = {}

    @rule(block=some_block)
    def put(self, block: Block) -> None:
        is_taken = self.tier.put(block) == Accepted()
        assert is_taken == (block.id not in self.expected)
        self.expected[block.id] = block

    @rule()
    def flush(self) -> None:
        assert self.tier.flush(20).is_empty

    @rule(block=some_block)
    def read(self, block: Block) -> None:
        result = read_now(self.tier, block.id, root=block.root)
        assert is_same(result, block) if block.id in self.expected else isinstance(result, MissingBlock)

    @rule(blocks=st.lists(some_block, max_size=6))
    def read_several(self, blocks: list[Block]) -> None:
        for root in (ROOT, OTHER_ROOT):
            wanted = [block for block in blocks if block.root == root]
            results: list[LoadedBlock | MissingBlock] = []
            assert self.tier.read([block.id for block in wanted], results.append, root=root).wait(20)
            assert [result.id for result in results] == [block.id for block in wanted]
            assert [isinstance(result, LoadedBlock) for result in results] == [b.id in self.expected for b in wanted]

    @rule(blocks=st.lists(some_block, max_size=3))
    def remove(self, blocks: list[Block]) -> None:
        self.tier.remove([block.id for block in blocks])
        for block in blocks:
            self.expected.pop(block.id, None)

    @rule(root=st.sampled_from([ROOT, OTHER_ROOT]))
    def clear(self, root: bytes) -> None:
        self.tier.clear(root)
        self.expected = {name: block for name, block in self.expected.items() if block.root != root}

    @rule(block=some_block, offset=st.integers(0, 4200))
    def damage(self, block: Block, offset: int) -> None:
        assert self.tier.flush(20).is_empty
        if block.id in self.expected:
            flip(path_of(self.directory, block), offset)
            assert isinstance(read_now(self.tier, block.id, root=block.root), MissingBlock)
            del self.expected[block.id]

    @rule(is_catalogue_lost=st.booleans())
    def restart(self, is_catalogue_lost: bool) -> None:
        assert self.tier.flush(20).is_empty
        self.tier.close()
        if is_catalogue_lost:
            (self.directory / "catalogue.sqlite").unlink()
        self.tier = open_tier(self.directory)
        if is_catalogue_lost:
            assert self.tier.flush(20).is_empty  # the scan makes blocks visible one slice at a time

    @invariant()
    def finds_what_there_is(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert {b.id for b in BLOCKS if self.tier.blocks.find(b.key, b.part)} == self.expected.keys()
        for parent in {block.parent for block in BLOCKS}:
            lengths = {b.num_tokens for b in self.expected.values() if b.parent == parent and b.part == "base"}
            assert set(self.tier.blocks.lengths(parent)) == lengths

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            assert self.tier.flush(20).is_empty
            assert self.tier.usage().num_blocks == sum(block.part == "base" for block in self.expected.values())
            assert self.tier.usage().disk_bytes == real_bytes(self.directory)
            self.tier.close()
            shutil.rmtree(self.directory.parent)


TestTierAgainstMemory = TierAgainstMemory.TestCase
TestTierAgainstMemory.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
