"""Names of sessions: the client's name, or a digest of the start of its first request.

The digest of a chat covers its first user message and the names of its tools: they stay the same from turn to turn even
if the system message contains a clock.
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
    given: str  # name given by the client, or empty
    digest: bytes  # digest of the start of the request

    def key(self, salt: str) -> str:
        """Return the key of a session, unique for each salt and name, from which neither can be derived."""
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
    """Return a digest of the fields. Each is hashed with its length, so that different lists never have the same
    bytes."""
    digest = blake3(derive_key_context=CONTEXT)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


# A client's JSON may contain half a surrogate pair.
SAFELY = ("utf-8", "surrogatepass")
