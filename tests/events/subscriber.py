"""A real subscriber: it knows what memory holds from events alone, and is strict about what they may say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import zmq

from kvstrata.engine.executor import EngineCore
from kvstrata.prefix_cache.keys import GridKeys, uniform_grid

BLOCK_TOKENS = 16


class Subscriber:
    def __init__(self, publish_url: str, replay_url: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._live = self._context.socket(zmq.SUB)
        self._live.connect(publish_url)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay_url = replay_url
        self.blocks: dict[int, tuple[int, ...]] = {}  # all tokens up to its end, by its number
        self.parents: dict[int, int | None] = {}
        self.sequences: list[int] = []
        self.kinds: set[str] = set()
        self.topics: set[str] = set()

    def hear(self, timeout_ms: int = 50) -> bool:
        """One message, if it comes in time."""
        if not self._live.poll(timeout_ms):
            return False
        topic, sequence, body = self._live.recv_multipart()
        self.topics.add(topic.decode())
        self._take(int.from_bytes(sequence, "big"), body)
        return True

    def ask_missed(self, first: int) -> list[int]:
        """Messages from that number on, as vLLM's subscribers ask for them. Tells their numbers."""
        numbers: list[int] = []
        socket = self._context.socket(zmq.REQ if first < 0 else zmq.DEALER)
        socket.connect(self._replay_url)
        socket.send_multipart([b"", first.to_bytes(8, "big", signed=True)])
        while socket.poll(10_000):
            _, sequence, body = socket.recv_multipart()
            number = int.from_bytes(sequence, "big", signed=True)
            if number == -1:
                socket.close()
                return numbers
            numbers.append(number)
            self._take(number, body)
        raise AssertionError("the answer did not end")

    def wait_until(self, is_so: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, "the events never told what holds"
            self.hear()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _take(self, sequence: int, body: bytes) -> None:
        at_s, events, rank = msgpack.unpackb(body)
        assert rank == 0
        assert abs(time.time() - at_s) < 600
        if self.sequences and sequence <= self.sequences[-1]:
            return
        self.sequences.append(sequence)
        for kind, *rest in events:
            self.kinds.add(kind)
            getattr(self, f"_{kind}")(*rest)

    def _BlockStored(  # noqa: N802
        self, numbers: list[int], parent: int | None, ids: list[int], size: int, *rest: Any
    ) -> None:
        assert rest == (None, "GPU", None)
        assert size == BLOCK_TOKENS
        assert len(ids) == size * len(numbers)
        for place, number in enumerate(numbers):
            assert number not in self.blocks, "what holds came once more"
            assert 0 <= number < 1 << 64
            before = () if parent is None else self.blocks[parent]
            self.blocks[number] = (*before, *ids[place * size : (place + 1) * size])
            self.parents[number] = parent
            parent = number

    def _BlockRemoved(self, numbers: list[int], medium: str) -> None:  # noqa: N802
        assert medium == "GPU"
        for number in numbers:
            del self.blocks[number], self.parents[number]
        assert not {*numbers} & {*self.parents.values()}, "a block went before what hangs on it"

    def _AllBlocksCleared(self) -> None:  # noqa: N802
        self.blocks.clear()
        self.parents.clear()


@contextmanager
def subscribed(publish_url: str, replay_url: str, topic: str = "") -> Iterator[Subscriber]:
    one = Subscriber(publish_url, replay_url, topic)
    try:
        yield one
    finally:
        one.close()


def blocks_of(core: EngineCore) -> dict[int, tuple[int, ...]]:
    """What the store's own tree holds, in whole blocks."""
    keys = GridKeys(uniform_grid(BLOCK_TOKENS))
    found: dict[int, tuple[int, ...]] = {}
    for node in core.prefix_cache.table.tree:
        ids = np.concatenate([above.tokens for above in node.path()])
        for position, key in keys.keys_for(node.root_key, ids):
            found[int.from_bytes(key[:8], "big")] = tuple(ids[:position].tolist())
    return found
