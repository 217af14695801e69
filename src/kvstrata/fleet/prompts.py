"""Routing inputs of a request: prefix keys of its prompt and its session, read from the bodies of every API.

Prompts are rendered and tokenized as a replica does it, except for earlier replies: only the replica that sampled them
knows their tokens. From such a reply on, the keys may match less than the replica has cached, never more. A body that
cannot be parsed gets no keys; the replica reports the error.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from kvstrata.errors import RequestError
from kvstrata.fleet.routing import RoutedRequest
from kvstrata.fleet.summary import PromptKeys
from kvstrata.prefix_cache.keys import Identity, as_ids, root_key
from kvstrata.server.app import APIS
from kvstrata.server.chat.prompt import PromptRenderer
from kvstrata.server.chat.request import ChatRequest
from kvstrata.server.http.access import salt_of
from kvstrata.server.sessions import SessionName, name_chat_session, name_text_session
from kvstrata.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Larger bodies are routed without keys: tokenizing them takes too long.
MAX_BODY_BYTES = 16 << 20


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

    def asked(self, body: bytes, scope: Scope) -> RoutedRequest:
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
