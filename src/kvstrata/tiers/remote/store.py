"""The protocol of stores: values by name, created once. Every call may wait, and may raise StoreFault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstrata.tiers.block_file import Damage, DamagedBlock

# Before every name, so that others can use the same store. It has the version of the values: servers of another version
# neither read nor delete them.
PREFIX = "kvstrata2"

CONNECT_S = 2.0

# Timeout of each part of an answer; a large value may take longer in all.
ANSWER_S = 3.0

Content = bytes | bytearray | memoryview

# Limit of a value where no model gives the size of a block.
LARGEST_VALUE_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredValue:
    name: str
    nbytes: int


class KeyValueStore(Protocol):
    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return sizes in bytes; 0: absent. Takes as few round trips as the store allows."""
        ...

    def leading(self, names: Sequence[str]) -> list[int]:
        """Return the sizes of values before the first absent one. A store with a request for each name may assume
        values between two present ones, with a neighbour's size: a read then finds out."""
        ...

    def get(self, name: str, max_bytes: int) -> bytes | memoryview | None:
        """Return a value; None: absent. Raises DamagedBlock for a larger value and reads no more of it: a writer to the
        store must not decide how much memory a server takes."""
        ...

    def create(self, name: str, content: Content, ttl_s: float) -> bool:
        """Create a value. False: the name has one already, which stays. `ttl_s` 0: the value does not expire."""
        ...

    def touch(self, names: Sequence[str], ttl_s: float) -> None:
        """Let values expire `ttl_s` from now. Absent names are ignored."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete values. Absent names are ignored."""
        ...

    def values(self) -> Iterator[StoredValue]:
        """Yield all values, in any order."""
        ...

    def sweep(self, ttl_s: float) -> int:
        """Delete expired values, if the store does not do so itself. Return their number."""
        ...

    def close(self) -> None: ...


def require_size(nbytes: int, max_bytes: int) -> None:
    if nbytes > max_bytes:
        raise DamagedBlock(Damage.SIZE, f"{nbytes} bytes, and at most {max_bytes} were expected")
