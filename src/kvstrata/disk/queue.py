"""Blocks on their way to the disk, in the order in which they came, bounded in bytes. Knows no threads and no files.

A block stays here until it is published, so it can be found at every moment: first here, then in the catalogue.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from kvstrata.tier.base import Refusal
from kvstrata.tier.block import BASE, Block, BlockId


@dataclass(slots=True, eq=False)
class Offer:
    """One offer of a block: the same block, offered again after it was withdrawn, is another."""

    block: Block
    replaces: bool = False  # the disk has the block in another form, which stays until this one is written
    num_attempts: int = 0


class BlockQueue:
    """`changed` guards it, and is told when a block comes. The writer tells when blocks have left."""

    def __init__(self, limit_bytes: int) -> None:
        self.changed = threading.Condition()
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.moved_s = 0.0  # when a block last left, or came to an empty queue
        self._offers: dict[BlockId, Offer] = {}
        self._lengths: dict[bytes, dict[BlockId, int]] = {}  # of the bases in it, by parent

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, block: Block, *, replaces: bool = False) -> Refusal | None:
        """None: taken."""
        with self.changed:
            if block.id in self._offers:
                return Refusal.PRESENT
            # A block that is larger than the whole queue goes alone: otherwise it could never be written.
            if self._offers and self.num_bytes + block.nbytes > self.limit_bytes:
                return Refusal.QUEUE_FULL
            if not self._offers:
                self.moved_s = time.monotonic()
            self._offers[block.id] = Offer(block, replaces)
            self.num_bytes += block.nbytes
            if block.part == BASE:
                self._lengths.setdefault(block.parent, {})[block.id] = block.num_tokens
            self.changed.notify_all()
        return None

    def find(self, block: BlockId) -> list[Block]:
        with self.changed:
            return [self._offers[block].block] if block in self._offers else []

    def lengths(self, parent: bytes) -> set[int]:
        with self.changed:
            return set(self._lengths.get(parent, {}).values())

    def num_after(self, parent: bytes) -> int:
        with self.changed:
            return len(self._lengths.get(parent, {}))

    def offers(self) -> list[Offer]:
        with self.changed:
            return list(self._offers.values())

    def has(self, offer: Offer) -> bool:
        with self.changed:
            return self._offers.get(offer.block.id) is offer

    def needed_keys(self) -> frozenset[bytes]:
        """Parents stay on the disk while their children are on the way; a base stays for its mark."""
        with self.changed:
            return frozenset(key for each in self._offers.values() for key in (each.block.parent, each.block.key))

    def hanging_on(self, offer: Offer) -> list[Offer]:
        """This one, and all that no lookup could reach without it. Parents are queued before their children, a base
        before its mark."""
        gone = {offer.block.key} if offer.block.part == BASE else set[bytes]()
        found: list[Offer] = []
        for other in self.offers():
            if other is offer or not gone.isdisjoint((other.block.key, other.block.parent)):
                if other.block.part == BASE:
                    gone.add(other.block.key)
                found.append(other)
        return found

    def remove(self, offer: Offer) -> None:
        with self.changed:
            if not self.has(offer):
                return
            del self._offers[offer.block.id]
            self.num_bytes -= offer.block.nbytes
            self.moved_s = time.monotonic()
            following = self._lengths.get(offer.block.parent, {})
            following.pop(offer.block.id, None)
            if not following:
                self._lengths.pop(offer.block.parent, None)
