"""What the remote tier asks of a store: values by name, created once. Every call may wait, and raises StoreFault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstrata.tiers.remote.health import Damage, DamagedBlock

# Before every name, so that others can use the same store.
PREFIX = "kvstrata1"

CONNECT_S = 2.0

# For a part of an answer to come; a large value may take longer in all.
ANSWER_S = 3.0

Content = bytes | bytearray | memoryview

# Of a value where no model says how large a block may be.
LARGEST_VALUE_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredValue:
    name: str
    nbytes: int


class Store(Protocol):
    def sizes(self, names: Sequence[str]) -> list[int]:
        """In bytes; 0: not there. As few round trips as the store allows."""
        ...

    def leading(self, names: Sequence[str]) -> list[int]:
        """The sizes of those before the first that is not there. A store that is asked name by name may take for there
        what lies between two that are, at the size of its neighbour: reading tells."""
        ...

    def get(self, name: str, max_bytes: int) -> bytes | memoryview | None:
        """None: not there. Raises DamagedBlock where the value is larger than this, and reads no more of it: whoever
        writes to the store must not decide how much memory a server takes."""
        ...

    def create(self, name: str, content: Content, ttl_s: float) -> bool:
        """False: there was one already, which stays. `ttl_s` 0: it does not expire."""
        ...

    def touch(self, names: Sequence[str], ttl_s: float) -> None:
        """These expire so long from now, as far as they are there."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Nothing happens to those that are not there."""
        ...

    def values(self) -> Iterator[StoredValue]:
        """All that lie here, in any order."""
        ...

    def sweep(self, ttl_s: float) -> int:
        """Delete what has expired, where the store does not do so itself. Tells how many."""
        ...

    def close(self) -> None: ...


def require_size(nbytes: int, max_bytes: int) -> None:
    if nbytes > max_bytes:
        raise DamagedBlock(Damage.SIZE, f"{nbytes} bytes, and at most {max_bytes} were expected")
