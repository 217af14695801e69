"""So many at once, and the others are told to come again. Belongs to the event loop's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstrata.errors import QueueFull

# Files that are imported at once: each is kept until it was found good.
MAX_IMPORTS = 4


class Places:
    def __init__(self, most: int = MAX_IMPORTS) -> None:
        self._most = most
        self._num_taken = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        if self._num_taken >= self._most:
            raise QueueFull(f"{self._num_taken} files are being imported already. Try again in a moment.")
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1
