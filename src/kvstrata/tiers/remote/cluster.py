"""Keys, names and seals that all servers of a store share. Knows no stores."""

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
        """Unseal a block. Raises DamagedBlock unless a server of this cluster made it and it is the wanted one."""
        return decode(unseal(self.keys, self.name_of(wanted), sealed), wanted, root, self.chain)
