"""What is known of one session, and where a prompt parts from the one before it. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstrata.engine.cache_api import TokenIds, owner_of

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
class Line:
    """One conversation of a session, as it was last sent and answered. Agents ask for titles and the like beside their
    main one, under the same name."""

    digest: bytes  # of what its first request began with
    ids: TokenIds  # prompt and reply
    num_prompt: int  # tokens of the prompt


@dataclass(frozen=True, eq=False)
class Session:
    key: str  # its name inside this server: one for each salt and name
    id: str  # as people see it; one for each session of an owner
    salt: str
    recognised_by: RecognisedBy
    created_s: float  # since the epoch
    last_use_s: float  # never the same for two sessions
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lines: tuple[Line, ...] = ()  # the newest first; none: they were forgotten
    parted: Parted | None = None  # the last time that a prompt did

    @property
    def owner(self) -> str:
        return owner_of(self.salt)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ids(self) -> TokenIds:
        """Of its longest conversation; none where they were forgotten."""
        longest = max(self.lines, key=lambda line: len(line.ids), default=None)
        return NO_IDS if longest is None else longest.ids

    @property
    def num_ids(self) -> int:
        """Token ids that it takes to remember it."""
        return sum(len(line.ids) for line in self.lines)

    def line_before(self, digest: bytes) -> Line | None:
        """What a request that begins so is to be compared with: its own conversation, or else the last one."""
        own = next((line for line in self.lines if line.digest == digest), None)
        return own or next(iter(self.lines), None)


NO_IDS = np.empty(0, np.int32)


def num_common(one: TokenIds, other: TokenIds) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    if not length:
        return 0
    differ = one[:length] != other[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


def parts_at(line: Line, ids: TokenIds) -> tuple[int, Where] | None:
    """None: the prompt goes on from the last one, or is the beginning of it."""
    at = num_common(line.ids, ids)
    if at == len(ids) or at == len(line.ids):
        return None
    return at, "prompt" if at < line.num_prompt else "reply"
