"""By what a session is recognised: the client's name for it, or how its first request began.

A chat begins with the text of its first user message and the names of its tools: those stay the same from turn to turn
even where the system text has a clock in it. Knows headers and messages; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3
from starlette.types import Scope

from kvstrata.server.conversation.chat import Chat
from kvstrata.server.sessions.session import RecognisedBy

CONTEXT = "kvstrata 2026-11 session v1"
KEY_CHARS = 40
OWN_HEADER = b"x-kvstrata-session"
CLAUDE_SESSION, CLAUDE_AGENT = b"x-claude-code-session-id", b"x-claude-code-agent-id"
FIRST_TOKENS = 64


@dataclass(frozen=True)
class Name:
    recognised_by: RecognisedBy
    given: str  # by the client; empty: it gave none
    digest: bytes  # of how the request began

    def key(self, salt: str) -> str:
        """One for each salt and name, which tells neither."""
        fields = [salt.encode(*SAFELY), b"given" if self.given else b"derived"]
        return _digest([*fields, self.given.encode(*SAFELY) or self.digest]).hex()[:KEY_CHARS]


def name_of_chat(scope: Scope, chat: Chat) -> Name:
    tools = sorted(str(tool["function"]["name"]) for tool in chat.tools)
    first = next((message for message in chat.messages if message["role"] == "user"), None)
    text = "" if first is None else _text(first.get("content"))
    digest = _digest(part.encode(*SAFELY) for part in ("chat", text, *tools))
    return _name(scope, chat.wanted.cache_key, digest, "first message")


def name_of_text(scope: Scope, cache_key: str | None, prompt: Sequence[int]) -> Name:
    digest = _digest([b"text", *(str(token).encode() for token in prompt[:FIRST_TOKENS])])
    return _name(scope, cache_key, digest, "first tokens")


def _name(scope: Scope, cache_key: str | None, digest: bytes, derived: RecognisedBy) -> Name:
    headers = {name: value.decode("latin-1").strip() for name, value in reversed(scope.get("headers", ()))}
    claude = headers.get(CLAUDE_SESSION, "")
    agent = headers.get(CLAUDE_AGENT, "")
    given: tuple[tuple[RecognisedBy, str], ...] = (
        ("x-kvstrata-session", headers.get(OWN_HEADER, "")),
        ("prompt_cache_key", cache_key or ""),
        ("x-claude-code-session-id", f"{claude}:{agent}" if claude and agent else claude),
    )
    for recognised_by, name in given:
        if name:
            return Name(recognised_by, name, digest)
    return Name(derived, "", digest)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _digest(fields: Iterable[bytes]) -> bytes:
    """Each is written with its length, so that no two lists spell the same bytes."""
    digest = blake3(derive_key_context=CONTEXT)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


# A client's JSON may hold half a surrogate pair.
SAFELY = ("utf-8", "surrogatepass")
