"""The blocks that pins keep on the disk, by pin: a pin that comes or goes costs its own blocks, however many others
there are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable


class PinnedBlocks:
    """`keys`: what the tier asks about, on a thread of its own, before it evicts. Blocks are looked up on one thread
    and written on another, so changes are guarded by a lock."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys
        self._lock = threading.Lock()  # guards the next two, and changes of the keys
        self._by_pin: dict[Hashable, set[bytes]] = {}
        self._num_pins: Counter[bytes] = Counter()  # that keep a block

    def begin(self, pin: Hashable) -> None:
        """From now on blocks are kept for a pin."""
        with self._lock:
            self._by_pin.setdefault(pin, set())

    def keep(self, pins: Iterable[Hashable], keys: Iterable[bytes]) -> None:
        """Keep blocks for some pins, as far as these have not ended meanwhile."""
        with self._lock:
            kept = [self._by_pin[pin] for pin in pins if pin in self._by_pin]
            for key in keys if kept else ():
                for own in kept:
                    self._num_pins[key] += key not in own
                    own.add(key)
                self._keys.add(key)

    def end(self, pins: Iterable[Hashable]) -> None:
        """Let go of what no other pin keeps."""
        with self._lock:
            for pin in pins:
                for key in self._by_pin.pop(pin, ()):
                    self._num_pins[key] -= 1
                    if not self._num_pins[key]:
                        del self._num_pins[key]
                        self._keys.discard(key)
