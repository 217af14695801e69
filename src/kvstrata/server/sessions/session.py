"""A session, and the divergence of a prompt from the session's last one. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.engine.cache_api import owner_of

# The field that names the session, or the part of its first request that identifies it.
RecognisedBy = Literal[
    "x-kvstrata-session", "prompt_cache_key", "x-claude-code-session-id", "first message", "first tokens"
]
# prompt: text that was sent before has changed. reply: the client sends back a reply that differs from the sampled one,
# or only its beginning.
Where = Literal["prompt", "reply"]


@dataclass(frozen=True)
class Parted:
    """The point at which a prompt diverged from the session's last one, and the texts there."""

    at: int  # the first token that differs
    where: Where
    before: str  # common text before it
    was: str
    now: str
    request: int  # number of the diverged request in the session, from 1

    @property
    def notes(self) -> dict[str, str]:
        """Notes for the miss header."""
        return {"at" if self.where == "prompt" else "reply_at": str(self.at), "was": self.was, "now": self.now}


@dataclass(frozen=True, eq=False)
class Session:
    """Names and counters of a session. The engine has the tokens of its conversations."""

    key: str  # internal name: unique for each salt and name
    id: str  # public name: unique for each owner
    salt: str
    recognised_by: RecognisedBy
    created_s: float  # since the epoch
    last_use_s: float  # unique among sessions
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    parted: Parted | None = None  # the last divergence

    @property
    def owner(self) -> str:
        return owner_of(self.salt)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
