"""Routing inputs of a request: prefix keys of its prompt and its session, read from the bodies of every API.

Prompts are rendered and tokenized as a replica does it, except for earlier replies: only the replica that sampled them
knows their tokens. From such a reply on, the keys may match less than the replica has cached, never more. A body that
cannot be parsed gets no keys; the replica reports the error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from kvstrata.errors import RequestError
from kvstrata.fleet.routing import Asked
from kvstrata.fleet.summary import PromptKeys
from kvstrata.prefix_cache.keys import Identity, as_ids, root_key
from kvstrata.server.anthropic import ask as anthropic
from kvstrata.server.anthropic.schema import MessagesAsked
from kvstrata.server.auth import salt_of
from kvstrata.server.cache_words import PromptAsked
from kvstrata.server.conversation.body import read_body, validated
from kvstrata.server.conversation.chat import Chat
from kvstrata.server.conversation.prompt import Renderer
from kvstrata.server.openai import ask as openai
from kvstrata.server.openai.schema import ChatAsked, CompletionAsked
from kvstrata.server.responses import ask as responses
from kvstrata.server.responses.schema import ResponseAsked
from kvstrata.server.responses.stored import StoredResponses
from kvstrata.server.sessions.names import Name, name_of_chat, name_of_text
from kvstrata.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Larger bodies are routed without keys: tokenizing them takes too long.
MAX_BODY_BYTES = 16 << 20
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


@dataclass(frozen=True)
class _Prompt:
    ids: tuple[int, ...]
    salt: str
    name: Name


class Prompts:
    """Reader of prompts for one model. Thread-safe."""

    def __init__(self, tokenizer: TokenizerWrapper, renderer: Renderer, identity: Identity) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._identity = identity
        self._lock = threading.Lock()  # guards _keys
        self._keys = PromptKeys()
        self._readers: Mapping[str, Callable[[bytes, Scope], _Prompt]] = {
            CHAT: self._of_openai,
            COMPLETION: self._of_text,
            MESSAGES: self._of_anthropic,
            RESPONSES: self._of_response,
            "/cache/explain": self._of_question,
            "/cache/pin": self._of_question,
            "/cache/unpin": self._of_question,
        }

    def reads(self, path: str) -> bool:
        return path in self._readers

    def asked(self, body: bytes, scope: Scope) -> Asked:
        if not self.reads(scope["path"]) or len(body) > MAX_BODY_BYTES:
            return Asked(0)
        try:
            prompt = self._readers[scope["path"]](body, scope)
        except RequestError:
            return Asked(0)
        with self._lock:
            keys = self._keys.of(root_key(self._identity, prompt.salt), as_ids(prompt.ids))
        return Asked(len(prompt.ids), keys, prompt.name.key(prompt.salt))

    def _of_openai(self, body: bytes, scope: Scope) -> _Prompt:
        return self._of_chat(openai.conversation(read_body(ChatAsked, body)), scope)

    def _of_anthropic(self, body: bytes, scope: Scope) -> _Prompt:
        return self._of_chat(anthropic.conversation(read_body(MessagesAsked, body)), scope)

    def _of_response(self, body: bytes, scope: Scope) -> _Prompt:
        """Read a request to /v1/responses. One that continues an earlier response can be read only by the replica that
        keeps it, so it raises RequestError here."""
        asked = read_body(ResponseAsked, body)
        box, items, num_before = responses.understood(asked, StoredResponses(), "")
        return self._of_chat(responses.conversation(asked, box, items, num_before), scope)

    def _of_text(self, body: bytes, scope: Scope) -> _Prompt:
        return self._of_completion(read_body(CompletionAsked, body), scope)

    def _of_question(self, body: bytes, scope: Scope) -> _Prompt:
        asked = read_body(PromptAsked, body)
        request = {**asked.model_dump(exclude_none=True, exclude={"tokens", "session"}), "model": asked.model or ""}
        if asked.messages is not None:
            return self._of_chat(openai.conversation(validated(ChatAsked, request)), scope)
        ids = asked.tokens if asked.prompt is None else asked.prompt
        return self._of_completion(validated(CompletionAsked, {**request, "prompt": ids}), scope)

    def _of_chat(self, chat: Chat, scope: Scope) -> _Prompt:
        salt = salt_of(scope, chat.wanted.cache_salt)
        ids = self._renderer.render(self._renderer.shown(chat), salt)
        return _Prompt(ids, salt, name_of_chat(scope, chat))

    def _of_completion(self, asked: CompletionAsked, scope: Scope) -> _Prompt:
        """Read a completion request. Of several prompts only the first is used for routing."""
        first = openai.as_list(asked.prompt)[0] if asked.prompt else ""
        ids = encode_prompt(self._tokenizer, first) if isinstance(first, str) else tuple(first)
        return _Prompt(ids, salt_of(scope, asked.cache_salt), name_of_text(scope, asked.prompt_cache_key, ids))
