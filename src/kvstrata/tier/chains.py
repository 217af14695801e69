"""A conversation on a tier: a chain of blocks, each named by its tokens and all that comes before. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


@dataclass(frozen=True)
class Link:
    """One block of a chain."""

    key: bytes
    parent: bytes
    start: int
    end: int
    nbytes: int = 0  # on the tier, or on its way there; 0: it is not there yet
    is_queued: bool = False  # it is on its way


@dataclass(frozen=True)
class TierMatch:
    links: tuple[Link, ...] = ()
    mark_bytes: int = 0  # of the mark at the end; 0: there need not be one

    @property
    def num_tokens(self) -> int:
        return self.links[-1].end if self.links else 0

    def after(self, known_tokens: int) -> TierMatch:
        """The blocks that have more than the first tokens."""
        return replace(self, links=tuple(link for link in self.links if link.end > known_tokens))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block, and of the mark."""
        blocks = tuple(link.nbytes for link in self.links)
        return (*blocks, self.mark_bytes) if self.mark_bytes else blocks


@dataclass(frozen=True)
class OnDisk:
    """What a tier can say about a prompt."""

    num_tokens: int = 0  # that a sequence can go on from
    is_damaged_next: bool = False  # a block that goes on where the chain ends was found damaged, and put aside
    has_others_only: bool = False  # there are blocks, and none under this root
