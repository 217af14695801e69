"""Keys of a prompt, read from the bodies of every API, and a replica's summary of the keys that it has cached.

Prompts are rendered and tokenized as a replica does it, except for earlier replies: only the replica that sampled them
knows their tokens. From such a reply on, the keys may match less than the replica has cached, never more. A body that
cannot be parsed gets no keys; the replica reports the error.

A summary is a listener of the prefix cache (`events/feed.py`), called on a thread other than the engine's. It keeps the
first bytes of chained keys (`prefix_cache/keys.py`), so it reveals no text. Its size is bounded: a conversation of 128k
tokens has 144 keys, and beyond `max_keys` the oldest are dropped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from starlette.types import Scope

from kvstrata.errors import RequestError
from kvstrata.fleet.routing import RoutedRequest
from kvstrata.prefix_cache.keys import GridKeys, Identity, TokenIds, as_ids, root_key, widening_grid
from kvstrata.server.app import APIS
from kvstrata.server.chat.prompt import PromptRenderer
from kvstrata.server.chat.request import ChatRequest
from kvstrata.server.http.access import salt_of
from kvstrata.server.sessions import SessionName, name_chat_session, name_text_session
from kvstrata.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MAX_KEYS = 1 << 14
SHORT_BYTES = 8
# Larger bodies are routed without keys: tokenizing them takes too long.
MAX_BODY_BYTES = 16 << 20


def short_key(key: bytes) -> int:
    return int.from_bytes(key[:SHORT_BYTES], "little")


class PromptKeys:
    """Prefix keys of prompts, shortened for routing."""

    def __init__(self) -> None:
        self._keys = GridKeys(widening_grid)

    def of(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, int]]:
        return [(position, short_key(key)) for position, key in self._keys.keys_for(root_key, ids)]


class ReplicaSummary:
    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys = PromptKeys()
        self._lock = threading.Lock()  # guards _held and _keys
        self._held: OrderedDict[int, None] = OrderedDict()  # newest last

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """Make all keys of a prompt's prefix the newest, so that reused prefixes stay."""
        del start
        with self._lock:
            for _, key in self._keys.of(root_key, ids):
                self._held[key] = None
                self._held.move_to_end(key)
            while len(self._held) > self._max_keys:
                self._held.popitem(last=False)

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        with self._lock:
            for position, key in self._keys.of(root_key, ids):
                if position > start:
                    self._held.pop(key, None)

    def cleared(self) -> None:
        with self._lock:
            self._held.clear()

    def to_bytes(self) -> bytes:
        """Return the keys as bytes; `keys_from_bytes` reads them."""
        with self._lock:
            return np.fromiter(self._held, dtype="<u8", count=len(self._held)).tobytes()


def keys_from_bytes(packed: bytes) -> frozenset[int]:
    return frozenset(np.frombuffer(packed, dtype="<u8").tolist())


@dataclass(frozen=True)
class _Prompt:
    ids: tuple[int, ...]
    salt: str
    name: SessionName


class PromptReader:
    """Reader of prompts for one model. Thread-safe."""

    def __init__(self, tokenizer: TokenizerWrapper, renderer: PromptRenderer, identity: Identity) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._identity = identity
        self._lock = threading.Lock()  # guards _keys
        self._keys = PromptKeys()
        self._parsers = {path: parser for api in APIS for path, parser in api.parsers.items()}

    def reads(self, path: str) -> bool:
        return path in self._parsers

    def read_prompt(self, body: bytes, scope: Scope) -> RoutedRequest:
        if not self.reads(scope["path"]) or len(body) > MAX_BODY_BYTES:
            return RoutedRequest(0)
        try:
            prompt = self._read(body, scope)
        except RequestError:
            return RoutedRequest(0)
        with self._lock:
            keys = self._keys.of(root_key(self._identity, prompt.salt), as_ids(prompt.ids))
        return RoutedRequest(len(prompt.ids), keys, prompt.name.key(prompt.salt))

    def _read(self, body: bytes, scope: Scope) -> _Prompt:
        """Read a prompt with its API's parser. Of several prompts only the first is used for routing."""
        parsed = self._parsers[scope["path"]](body)
        salt = salt_of(scope, parsed.params.cache_salt)
        if isinstance(parsed, ChatRequest):
            return _Prompt(self._renderer.render_plain(parsed, salt), salt, name_chat_session(scope, parsed))
        first = parsed.prompts[0] if parsed.prompts else ""
        ids = encode_prompt(self._tokenizer, first) if isinstance(first, str) else tuple(first)
        return _Prompt(ids, salt, name_text_session(scope, parsed.params.cache_key, ids))
