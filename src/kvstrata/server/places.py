"""Limits on concurrent imports, in number and in total bytes; further ones are asked to try again. Belongs to the event
loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstrata.errors import QueueFull
from kvstrata.sizes import format_bytes

# Concurrent imports: each file is kept until it has been verified.
MAX_IMPORTS = 4


class Places:
    def __init__(self, most: int = MAX_IMPORTS) -> None:
        self._most = most
        self._num_taken = 0
        self._num_bytes = 0

    @contextmanager
    def take(self, most_bytes: int) -> Iterator[Callable[[int], None]]:
        """Reserve a place for an import, and yield a function to call before more bytes of its file are written.
        `most_bytes`: limit of all files together, and so of a single one."""
        if self._num_taken >= self._most:
            raise QueueFull(f"{self._num_taken} files are being imported already. Try again in a moment.")
        own_bytes = 0

        def grow(num_bytes: int) -> None:
            nonlocal own_bytes
            if self._num_bytes + num_bytes > most_bytes:
                raise QueueFull(
                    f"The files that are being imported would have more than {format_bytes(most_bytes)} together. Try "
                    "again when the others are done."
                )
            own_bytes += num_bytes
            self._num_bytes += num_bytes

        self._num_taken += 1
        try:
            yield grow
        finally:
            self._num_taken -= 1
            self._num_bytes -= own_bytes
