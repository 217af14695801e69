"""What the servers of one store have in common: keys, names, and how blocks are sealed. Knows no stores."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.tiers.block import Block, BlockId, Chain
from kvstrata.tiers.remote.payload import decode, encode
from kvstrata.tiers.remote.sealing import Keys, Names, seal, unseal


@dataclass(frozen=True)
class Cluster:
    keys: Keys
    names: Names
    chain: Chain

    def name_of(self, block: BlockId) -> str:
        return self.names.of(block.key, block.part)

    def sealed(self, block: Block) -> bytes | bytearray:
        return seal(self.keys, self.name_of(block.id), encode(block))

    def opened(self, wanted: BlockId, root: bytes, sealed: bytes | memoryview) -> Block:
        """Raises DamagedBlock where it is not the block that is wanted, made by a server of this cluster."""
        return decode(unseal(self.keys, self.name_of(wanted), sealed), wanted, root, self.chain)
