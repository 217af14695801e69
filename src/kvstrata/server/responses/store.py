"""The store of responses in memory, for requests that build on earlier ones. Bounded; evicts the least recently used.

Stores JSON as bytes, so that its size is known and a returned response cannot be modified. Compares salts of owners,
not keys. Safe from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.engine.cache_api import owner_of

MAX_RESPONSES = 1_000
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredResponse:
    id: str
    salt: str  # of the request
    answer: bytes  # as it was sent
    items: bytes  # all input items as a JSON list, earlier responses included
    output_ids: tuple[str, ...] = ()  # of the items in the answer

    @property
    def owner(self) -> str:
        """The salt of the key that created the response."""
        return owner_of(self.salt)

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.items)


class ResponseStore:
    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first
        self._used_s: dict[str, float] = {}  # by id, since the epoch
        self._clock = clock
        self._by_item: dict[str, str] = {}  # response ids by the ids of their output
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._by_id)

    def keep(self, response: StoredResponse) -> None:
        """Store a response. A response above the size limit is not stored, rather than evicting all others for
        nothing."""
        if response.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._by_id[response.id] = response
            self._used_s[response.id] = self._clock()
            self._by_item.update(dict.fromkeys(response.output_ids, response.id))
            self._num_bytes += response.num_bytes
            while len(self._by_id) > self._max_responses or self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._by_id)))

    def find(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """Return a response, or None. `owner`: the required owner; None: any."""
        with self._lock:
            found = self._owned(response_id, owner)
            return None if found is None else self._used(found)

    def find_to_continue(self, response_id: str, salt: str) -> StoredResponse | None:
        """Return a response to continue, or None. The salt must match, because other salts of the same key are separate
        too."""
        with self._lock:
            found = self._by_id.get(response_id)
            return self._used(found) if found is not None and found.salt == salt else None

    def find_with_item(self, item_id: str, salt: str) -> StoredResponse | None:
        """Return the response whose output contains an item, or None. The salt must match."""
        return self.find_to_continue(self._by_item.get(item_id, ""), salt)

    def remove(self, response_id: str, owner: str | None) -> bool:
        with self._lock:
            found = self._owned(response_id, owner)
            if found is not None:
                self._drop(response_id)
            return found is not None

    def clear(self, salt: str | None, owner: str | None) -> None:
        """Remove the responses under a salt, under all salts of an owner, or all."""
        with self._lock:
            for response in list(self._by_id.values()):
                if salt in (None, response.salt) and owner in (None, response.owner):
                    self._drop(response.id)

    def expire(self, before_s: float) -> None:
        """Remove the responses that were last used before a time."""
        with self._lock:
            while self._by_id and self._used_s[oldest := next(iter(self._by_id))] < before_s:
                self._drop(oldest)

    def _used(self, response: StoredResponse) -> StoredResponse:
        self._by_id.move_to_end(response.id)
        self._used_s[response.id] = self._clock()
        return response

    def _owned(self, response_id: str, owner: str | None) -> StoredResponse | None:
        found = self._by_id.get(response_id)
        return found if found is not None and owner in (None, found.owner) else None

    def _drop(self, response_id: str) -> None:
        gone = self._by_id.pop(response_id)
        self._num_bytes -= gone.num_bytes
        del self._used_s[response_id]
        for item_id in gone.output_ids:
            self._by_item.pop(item_id, None)
