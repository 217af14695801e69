"""How much KV will fit, at each precision, before a model is loaded. Pure: an outline and a memory limit in, rows out.

The arithmetic is the engine's own (memory.py, rungs.py, spans/plan.py); only the scratch of passes is expected instead
of measured (expected.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.codecs.registry import parse
from kvstrata.engine.expected import expected_scratch
from kvstrata.engine.limits import Limits
from kvstrata.engine.memory import Budget, MemoryShares, Scratch, share_memory
from kvstrata.engine.planned import least_token_bytes
from kvstrata.engine.rungs import make_rungs
from kvstrata.engine.scratch import MAX_CHUNK_CPU, MAX_CHUNK_GPU
from kvstrata.engine.storage import Storage
from kvstrata.errors import ConfigError
from kvstrata.layers.kinds import Layout
from kvstrata.models.outline import Outline
from kvstrata.spans.convert import bits_of
from kvstrata.spans.plan import Plan, make_plan, raw_plan
from kvstrata.tier.block import BLOCK_TOKENS

# K and V: what docs/quality.md recommends, the most exact first.
PRECISIONS = (("raw", "raw"), ("planes:8", "planes:8"), ("planes:8", "planes:4"), ("planes:4", "planes:4"))
LENGTHS = (8192, 32768)
# A block's header and the padding behind it, in its file.
BLOCK_OVERHEAD_BYTES = 8192


@dataclass(frozen=True)
class Stored:
    """Conversations of one length."""

    tokens: int
    bytes: int  # of one
    conversations: int  # that fit into memory
    disk_bytes: int  # of one
    disk_conversations: int | None  # that fit on the disk; None: no size was given


@dataclass(frozen=True)
class Row:
    """One precision."""

    k: str
    v: str
    token_bytes: float
    kv_bytes: int  # that are left for KV
    tokens: int | None  # of one conversation that takes all of it; None: tokens take no memory
    longest_tokens: int  # of one request that runs, by memory and context
    longest_live_tokens: int  # with --kv-cache-live
    stored: tuple[Stored, ...]
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@dataclass(frozen=True)
class Forecast:
    shares: MemoryShares  # at full precision
    token_bytes: int  # at full precision
    sequence_bytes: int  # of each running request, whatever its length: windows and recurrent states
    mark_bytes: int  # of one resume point at full precision; 0: the model needs none
    max_marks: int
    rows: tuple[Row, ...]
    refused: tuple[str, ...]  # precisions that this model's layers cannot be stored in, and why


def forecast(
    outline: Outline,
    limit_bytes: int,
    *,
    disk_bytes: int | None = None,
    precisions: Sequence[tuple[str, str]] = PRECISIONS,
    lengths: Sequence[int] = LENGTHS,
    scratch: Scratch | None = None,
) -> Forecast:
    """`scratch`: of passes, where it was measured. Raises ConfigError for a precision that there is not."""
    scratch = scratch or expected_scratch(outline, rows=Limits.max_running)
    rows, refused = [], []
    fitting = [length for length in lengths if length <= outline.context_tokens] or [outline.context_tokens]
    for k, v in precisions if _can_be_stored(outline.layout) else (("raw", "raw"),):
        storage = Storage(k=parse(k), v=parse(v))
        try:
            plan = make_plan(outline.layout, storage.k, storage.v)
        except ConfigError as error:
            refused.append(f"{k}/{v}: {error}")
            continue
        shares = _shares(outline, limit_bytes, scratch, storage)
        rows.append(_row(outline, storage, plan, shares, fitting, disk_bytes))
    layout = outline.layout
    return Forecast(
        shares=_shares(outline, limit_bytes, scratch, Storage()),
        token_bytes=layout.token_bytes,
        sequence_bytes=layout.fixed_bytes,
        mark_bytes=_mark_bytes(layout, raw_plan(layout), outline.context_tokens),
        max_marks=Storage.max_marks,
        rows=tuple(rows),
        refused=tuple(refused),
    )


def advise(found: Forecast, *, tokens: int, conversations: int) -> Row | None:
    """The most exact row that holds so many conversations of so many tokens; None: none does."""
    return next((row for row in found.rows if _holds(row, tokens, conversations)), None)


def needs_live(row: Row, tokens: int) -> bool:
    """Whether a request of so many tokens runs only if its own KV is encoded too."""
    return row.longest_tokens < tokens <= row.longest_live_tokens


def _holds(row: Row, tokens: int, conversations: int) -> bool:
    fits = next((each.conversations for each in row.stored if each.tokens == tokens), 0)
    return fits >= conversations and max(row.longest_tokens, row.longest_live_tokens) >= tokens


def _row(
    outline: Outline,
    storage: Storage,
    plan: Plan,
    shares: MemoryShares,
    lengths: Sequence[int],
    disk_bytes: int | None,
) -> Row:
    layout, kv_bytes = outline.layout, max(0, shares.kv_bytes)
    token_bytes = plan.token_bytes(layout) or float(layout.token_bytes)
    marks_bytes = Storage.max_marks * _mark_bytes(layout, plan, outline.context_tokens)
    return Row(
        k=storage.k.name,
        v=storage.v.name,
        token_bytes=token_bytes,
        kv_bytes=kv_bytes,
        tokens=int(max(0, kv_bytes - marks_bytes) / token_bytes) if token_bytes else None,
        longest_tokens=_longest(outline, storage, kv_bytes, live=False),
        longest_live_tokens=_longest(outline, storage, kv_bytes, live=True),
        stored=tuple(_stored(layout, plan, tokens, kv_bytes, disk_bytes) for tokens in lengths),
        flags=_flags(storage),
    )


def _stored(layout: Layout, plan: Plan, tokens: int, kv_bytes: int, disk_bytes: int | None) -> Stored:
    token_bytes = plan.token_bytes(layout) or float(layout.token_bytes)
    one = math.ceil(tokens * token_bytes) + Storage.max_marks * _mark_bytes(layout, plan, tokens)
    on_disk = one + math.ceil(tokens / BLOCK_TOKENS) * BLOCK_OVERHEAD_BYTES
    return Stored(tokens, one, kv_bytes // one, on_disk, None if disk_bytes is None else disk_bytes // on_disk)


def _mark_bytes(layout: Layout, plan: Plan, tokens: int) -> int:
    """Of one point that a stored conversation can be resumed at: rings and chunks as they are stored, and states."""
    total = 0.0
    for spec, (k, v) in zip(layout.flat(), plan.pairs, strict=True):
        if spec.kind in ("window", "chunked"):
            bits = bits_of(k, spec.k_dim, spec.dtype) * spec.k_dim + bits_of(v, spec.v_dim, spec.dtype) * spec.v_dim
            total += min(spec.max_size, tokens) * spec.kv_heads * bits / 8
        elif spec.kind == "recurrent":
            total += spec.state_bytes
    return math.ceil(total)


def _longest(outline: Outline, storage: Storage, kv_bytes: int, *, live: bool) -> int:
    """By the same rungs that a server admits requests by."""
    layout = outline.layout
    budget = Budget(kv_bytes, layout.fixed_bytes, layout.token_bytes)
    if kv_bytes < budget.bytes_for(1):
        return 0
    if not layout.token_bytes:
        return outline.context_tokens
    chunk = MAX_CHUNK_CPU if outline.backend == "cpu" else MAX_CHUNK_GPU
    held = Storage(k=storage.k, v=storage.v, live=live and _can_be_stored(layout))
    return max(0, min(outline.context_tokens, budget.most_tokens(make_rungs(layout, held, chunk)[0])))


def _shares(outline: Outline, limit_bytes: int, scratch: Scratch, storage: Storage) -> MemoryShares:
    return share_memory(
        limit_bytes,
        outline.weight_bytes,
        scratch,
        token_bytes=least_token_bytes(outline.layout, storage),
        context_tokens=outline.context_tokens,
        backend=outline.backend,
    )


def _can_be_stored(layout: Layout) -> bool:
    """Caches that only the model knows are kept as they are, and shared with no other request."""
    return all(spec.kind != "foreign" for spec in layout.flat())


def _flags(storage: Storage) -> tuple[str, ...]:
    k, v = storage.k.name, storage.v.name
    if k == v == "raw":
        return ()
    if k == v == "planes:8":
        return ("--kv-cache-quantization",)
    if k == v and k.startswith("planes:"):
        return ("--kv-cache-bits", k.removeprefix("planes:"))
    return ("--kv-cache-k", k, "--kv-cache-v", v)
