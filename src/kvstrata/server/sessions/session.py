"""A session, and the text at which a prompt diverged from its last one. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.engine.cache_api import owner_of

# By which word of the client, or by what of its first request.
RecognisedBy = Literal[
    "x-kvstrata-session", "prompt_cache_key", "x-claude-code-session-id", "first message", "first tokens"
]
# prompt: something that was sent before is different now. reply: the client sends our reply back otherwise than it was
# sampled, or only the beginning of it.
Where = Literal["prompt", "reply"]


@dataclass(frozen=True)
class Parted:
    """Where a prompt parted from the session's last one, and by which text."""

    at: int  # the first token that differs
    where: Where
    before: str  # what both have before it
    was: str
    now: str
    request: int  # of the session, from 1 on: the one that parted

    @property
    def notes(self) -> dict[str, str]:
        """For the header that says why a prompt missed."""
        return {"at" if self.where == "prompt" else "reply_at": str(self.at), "was": self.was, "now": self.now}


@dataclass(frozen=True, eq=False)
class Session:
    """Names and counters of a session. The engine has the tokens of its conversations."""

    key: str  # its name inside this server: one for each salt and name
    id: str  # as people see it; one for each session of an owner
    salt: str
    recognised_by: RecognisedBy
    created_s: float  # since the epoch
    last_use_s: float  # never the same for two sessions
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    parted: Parted | None = None  # the last time that a prompt did

    @property
    def owner(self) -> str:
        return owner_of(self.salt)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
