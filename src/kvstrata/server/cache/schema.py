"""Request and response types of /cache as JSON, and functions that build the responses from reports. Calls no
engine.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from kvstrata.engine.cache_api import (
    CacheUsage,
    ChangeProgress,
    ChangeResult,
    Explanation,
    PartUsage,
    Scope,
    SequenceUsage,
    SharedUsage,
    Tier,
    TierChange,
    TierUsage,
)
from kvstrata.server.chat.prompt import RenderedPrompt
from kvstrata.server.http.json_body import Items, RequestModel
from kvstrata.server.openai.schema import Message, TokenId, ToolOffered
from kvstrata.server.sessions import RecognisedBy, Session, SessionDivergence, Where

# Scope of a response's figures: one key, or all keys.
Under = Literal["key", "all"]


class PromptQuery(RequestModel):
    """A prompt as it would be sent to /v1: exactly one of messages, prompt, tokens and session."""

    model: str | None = Field(None, description="Left out: the one that is served")
    messages: Items[Message] | None = Field(None, min_length=1, description="As for /v1/chat/completions")
    tools: Items[ToolOffered] | None = Field(None, description="With messages")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="With messages")
    prompt: str | Items[TokenId] | None = Field(None, description="As for /v1/completions; one prompt")
    tokens: Items[TokenId] | None = Field(None, min_length=1, description="Token ids, taken as they are")
    session: str | None = Field(
        None, description="What a session's last request sent and was answered; ids as in /cache/sessions"
    )
    cache_salt: str | None = None
    prompt_cache_key: str | None = Field(None, description="As for /v1: the session that the prompt belongs to")


class ClearRequest(RequestModel):
    tier: Tier | None = Field(None, description="Where to clear; required without a salt. Left out: everywhere")
    salt: str | None = Field(
        None,
        description="Only what is under this cache_salt; empty: under none. Left out: everything; with a plain key "
        "all that is under it",
    )


class RequantizeRequest(RequestModel):
    """A precision change. A plain key changes only its own entries; the precision of future entries belongs to the
    server, and only an admin key may change it."""

    k: str | None = Field(None, description="Precision of keys, e.g. planes:4; left out: as it is")
    v: str | None = Field(None, description="Precision of values")
    ctk: str | None = Field(None, description="llama.cpp's word for k: f16, bf16, q8_0, q4_0")
    ctv: str | None = Field(None, description="llama.cpp's word for v")
    scope: Scope = "all"
    salt: str | None = Field(None, description="Only what is under this cache_salt")
    sequence: str | None = Field(None, description="Only what this running request holds; ids as in /cache/usage")
    dry_run: bool = False
    force: bool = Field(False, description="Going up: decode what is lower, though that brings no precision back")


class TierResponse(TypedDict):
    bytes: int
    tokens: int
    spans: int
    by_precision: dict[str, int]
    by_kind: dict[str, int]


class SequencePartResponse(TypedDict):
    tokens: int
    k: str
    v: str
    bytes: int
    shared_by: int


class SequenceResponse(TypedDict):
    id: str
    tokens: int
    parts: list[SequencePartResponse]


class TargetResponse(TypedDict):
    k: str
    v: str


class HeldResponse(TypedDict):
    """Cached bytes by precision."""

    k: dict[str, int]
    v: dict[str, int]


class RemoteResponse(TypedDict):
    """Traffic with a shared store since this server started. Other servers write to the store too, so its total
    contents are unknown here."""

    url: str
    precision: str
    written_bytes: int
    written_tokens: int
    written_today_bytes: int
    read_bytes: int
    read_tokens: int
    queue_bytes: int
    latency_s: float
    read_bytes_per_s: float
    paused_because: str
    counters: dict[str, dict[str, int]]


class UsageResponse(TypedDict):
    """Cache usage. For a plain key, `tiers`, `sequences`, `running_bytes`, `pinned_bytes` and `held` cover only its own
    entries; budgets, headroom, the allocator's figure, target and counters are the server's."""

    under: Under
    tiers: dict[str, TierResponse]
    remote: RemoteResponse | None
    sequences: list[SequenceResponse]
    budget_bytes: int
    hot_budget_bytes: int
    running_bytes: int
    pinned_bytes: int
    pin_quota_bytes: int | None
    headroom_bytes: int
    allocator_bytes: int
    target: TargetResponse
    held: HeldResponse
    counters: dict[str, int]


class DivergenceResponse(TypedDict):
    """The point where a prompt diverged from the session's last one. `was` and `now`: both texts from there on;
    `before`: the common text before it."""

    at: int
    where: Where
    before: str
    was: str
    now: str
    request: int


class SessionFound(TypedDict):
    """The session of a prompt. `divergence` is null if the prompt continues the session's last one."""

    id: str
    recognised_by: RecognisedBy
    divergence: DivergenceResponse | None


class ExplainResponse(TypedDict):
    prompt_tokens: int
    cached_tokens: int
    by_tier: dict[str, int]
    ends_because: str
    meaning: str
    at_token: int
    around: str
    before: str
    after: str
    instead: list[str]
    num_instead: int
    remote_paused_because: str
    hygiene: dict[str, int]
    replayed_turns: int
    replayed_tokens: int
    session: SessionFound | None


class ClearResponse(TypedDict):
    tier: Tier
    bytes: int
    tokens: int
    bytes_left: int


class PinResponse(TypedDict):
    prompt_tokens: int
    tokens: int


class LeftAloneResponse(TypedDict):
    tier: str
    reason: str
    spans: int
    bytes: int


class TierChangeResponse(TypedDict):
    spans: int
    bytes_before: int
    bytes_after: int
    bytes_freed: int


class RequantizeResponse(TypedDict):
    under: Under
    target: TargetResponse
    held: HeldResponse
    dry_run: bool
    spans: int
    bytes_before: int
    bytes_after: int
    tiers: dict[str, TierChangeResponse]
    left_alone: list[LeftAloneResponse]
    expected_error: float
    seconds: float
    note: str


class ProgressResponse(TypedDict):
    spans_total: int
    spans_done: int
    bytes_freed: int
    is_running: bool
    seconds: float


def usage_response(usage: CacheUsage, *, under: Under, pin_quota_bytes: int | None) -> UsageResponse:
    return {
        "under": under,
        "tiers": {name: _tier(tier) for name, tier in usage.tiers.items()},
        "remote": None if usage.remote is None else _remote(usage.remote),
        "sequences": [_sequence(sequence) for sequence in usage.sequences],
        "budget_bytes": usage.budget_bytes,
        "hot_budget_bytes": usage.hot_budget_bytes,
        "running_bytes": usage.running_bytes,
        "pinned_bytes": usage.pinned_bytes,
        "pin_quota_bytes": pin_quota_bytes,
        "headroom_bytes": usage.headroom_bytes,
        "allocator_bytes": usage.allocator_bytes,
        "target": target_response(usage),
        "held": held_response(usage),
        "counters": usage.counters,
    }


def target_response(usage: CacheUsage) -> TargetResponse:
    """Return the precision that new tokens are cached in."""
    k, v = usage.target
    return {"k": k, "v": v}


def held_response(usage: CacheUsage) -> HeldResponse:
    """Return the cached bytes by precision, resume points of window layers included, without the buffers of running
    requests."""
    hot = usage.tiers["hot"]
    return {"k": hot.k, "v": hot.v}


def requantize_response(changed: ChangeResult, held: HeldResponse, *, under: Under) -> RequantizeResponse:
    return {
        "under": under,
        "target": {"k": changed.k, "v": changed.v},
        "held": held,
        "dry_run": changed.dry_run,
        "spans": changed.spans,
        "bytes_before": changed.bytes_before,
        "bytes_after": changed.bytes_after,
        "tiers": {name: _tier_change(tier) for name, tier in changed.tiers.items()},
        "left_alone": [
            {"tier": it.tier, "reason": it.reason, "spans": it.spans, "bytes": it.nbytes} for it in changed.left_alone
        ],
        "expected_error": changed.expected_error,
        "seconds": changed.seconds,
        "note": _note(changed, under),
    }


def _tier_change(tier: TierChange) -> TierChangeResponse:
    return {
        "spans": tier.spans,
        "bytes_before": tier.bytes_before,
        "bytes_after": tier.bytes_after,
        "bytes_freed": tier.bytes_freed,
    }


def _note(changed: ChangeResult, under: Under) -> str:
    if not (changed.bytes_before or changed.left_alone):
        return "Nothing is cached in this scope."
    return "" if under == "all" else KEY_NOTE


def progress_response(progress: ChangeProgress) -> ProgressResponse:
    return {
        "spans_total": progress.spans_total,
        "spans_done": progress.spans_done,
        "bytes_freed": progress.bytes_freed,
        "is_running": progress.is_running,
        "seconds": progress.seconds,
    }


def explain_response(
    explained: Explanation,
    *,
    before: str,
    after: str,
    instead: list[str],
    made: RenderedPrompt | None,
    session: SessionFound | None,
) -> ExplainResponse:
    return {
        "prompt_tokens": explained.prompt_tokens,
        "cached_tokens": explained.cached_tokens,
        "by_tier": explained.by_tier,
        "ends_because": explained.ends_because,
        "meaning": MEANINGS[explained.ends_because],
        "at_token": explained.at_token,
        "around": before + after,
        "before": before,
        "after": after,
        "instead": instead,
        "num_instead": explained.num_instead,
        "remote_paused_because": explained.remote_paused_because,
        "hygiene": dict(made.hygiene) if made else {},
        "replayed_turns": made.replayed_turns if made else 0,
        "replayed_tokens": made.replayed_tokens if made else 0,
        "session": session,
    }


def session_found(session: Session | None, divergence: SessionDivergence | None) -> SessionFound | None:
    if session is None:
        return None
    return {"id": session.id, "recognised_by": session.recognised_by, "divergence": divergence_response(divergence)}


def divergence_response(divergence: SessionDivergence | None) -> DivergenceResponse | None:
    if divergence is None:
        return None
    return {
        "at": divergence.at,
        "where": divergence.where,
        "before": divergence.before,
        "was": divergence.was,
        "now": divergence.now,
        "request": divergence.request,
    }


def _tier(tier: TierUsage) -> TierResponse:
    return {
        "bytes": tier.nbytes,
        "tokens": tier.tokens,
        "spans": tier.spans,
        "by_precision": tier.by_precision,
        "by_kind": tier.by_kind,
    }


def _remote(remote: SharedUsage) -> RemoteResponse:
    usage = remote.usage
    return {
        "url": remote.place,
        "precision": remote.precision,
        "written_bytes": usage.written_bytes,
        "written_tokens": remote.written_tokens,
        "written_today_bytes": usage.written_today_bytes,
        "read_bytes": usage.read_bytes,
        "read_tokens": remote.read_tokens,
        "queue_bytes": usage.queue_bytes,
        "latency_s": remote.latency_s,
        "read_bytes_per_s": remote.read_bytes_per_s,
        "paused_because": usage.paused_because,
        "counters": {event: dict(counts) for event, counts in usage.counters.items()},
    }


def _sequence(sequence: SequenceUsage) -> SequenceResponse:
    return {"id": sequence.id, "tokens": sequence.tokens, "parts": [_part(part) for part in sequence.parts]}


def _part(part: PartUsage) -> SequencePartResponse:
    return {"tokens": part.tokens, "k": part.k, "v": part.v, "bytes": part.nbytes, "shared_by": part.shared_by}


KEY_NOTE = (
    "Only what is cached under this key changes. New KV has the precision of the server; an admin key (--admin-key) "
    "changes that."
)
MEANINGS = {
    "complete": "All that can be cached is cached; the last token of a prompt is always computed.",
    "new": "The cache ends here: the rest was never computed before.",
    "diverged": "The cached prompt differs from here on.",
    "evicted": "The rest was cached and was evicted to reclaim memory.",
    "damaged": "The next block on the disk was damaged and was quarantined; it is computed and written again.",
    "mark": "More is cached, but this model can be resumed only at a state checkpoint, and the last one is here.",
    "salt": "It is cached without this cache_salt; requests with different salts never share cached KV.",
    "empty": "Nothing is cached yet for this model, key and salt.",
    "identity": "Nothing is cached for this model, key and salt; the disk has only blocks of other weights, another "
    "template, other settings or another salt.",
    "foreign": "This model has caches of its own kind, which cannot be shared between requests.",
}
