"""Memory plan: divides a limit among weights, KV and scratch, before and after loading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.backend import MlxBackend
from kvstrata.codecs.registry import parse
from kvstrata.engine.budget import (
    MIB,
    Budget,
    least_token_bytes,
    make_formats,
)
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.errors import ConfigError
from kvstrata.layers.kinds import LayerSpec, Layout
from kvstrata.models.outline import Outline
from kvstrata.spans.convert import bits_of
from kvstrata.spans.plan import Plan, make_plan, raw_plan
from kvstrata.tier.block import BLOCK_TOKENS

FLOAT_BYTES = 4

# Of a chunk's scores with its context, on a CPU: they and their softmax are alive in part at once.
SCORES_COPIES = 1.45

# With sinks, and in models whose layers run one sequence at a time, MLX's own attention is used, which copies more.
PLAIN_SCORES_COPIES = 2.9

# Values as wide as the widest layer that are alive at once: a gate, what it opens, and their product.
WIDE_COPIES = 3

# Of one layer's keys and values as float32: decoded; on a GPU also joined with those of the chunk.
LAYER_COPIES_CPU = 1

LAYER_COPIES_GPU = 3


def expected_scratch(outline: Outline, *, rows: int) -> Scratch:
    """`rows`: most requests in one batch."""
    layout, is_cpu = outline.layout, outline.backend == "cpu"
    chunk = MAX_CHUNK_CPU if is_cpu else MAX_CHUNK_GPU
    item_bytes = max((spec.dtype.size for spec in layout.flat() if spec.kv_heads), default=FLOAT_BYTES)
    wide = WIDE_COPIES * outline.widest * item_bytes
    scores = _score_bytes(outline) * chunk if is_cpu else 0.0  # for each token of the context
    copies = LAYER_COPIES_CPU if is_cpu else LAYER_COPIES_GPU
    layer = copies * max((_float_bytes(spec) for spec in layout.flat()), default=0)
    lines = [
        ScratchLine(LOGITS_COPIES * LOGIT_BYTES * rows * outline.vocab_size),
        ScratchLine(int(LEEWAY * chunk * max(wide, scores))),
        ScratchLine(int(LEEWAY * chunk * wide), LEEWAY * (scores + layer)),
    ]
    if layout.path == "rows" and any(spec.kind == "full" for spec in layout.flat()):
        # Every layer's keys and values are joined at each step, and all of them are alive when it ends.
        lines.append(ScratchLine(0, LEEWAY * layout.token_bytes, of_all_rows=True))
    return Scratch(tuple(lines))


def _score_bytes(outline: Outline) -> float:
    """Of one query with one key, in all heads."""
    kinds = {spec.kind for spec in outline.layout.flat()}
    is_plain = outline.layout.path == "rows" or bool(kinds & {"recurrent"})
    return (PLAIN_SCORES_COPIES if is_plain else SCORES_COPIES) * FLOAT_BYTES * max(1, outline.num_heads)


def _float_bytes(spec: LayerSpec) -> int:
    return spec.kv_heads * (spec.k_dim + spec.v_dim) * FLOAT_BYTES


# K and V: what docs/quality.md recommends, the most exact first.
PRECISIONS = (("raw", "raw"), ("planes:8", "planes:8"), ("planes:8", "planes:4"), ("planes:4", "planes:4"))

LENGTHS = (8192, 32768)

# A block's header and the padding behind it, in its file.
BLOCK_OVERHEAD_BYTES = 8192


@dataclass(frozen=True)
class ConversationCapacity:
    """Conversations of one length."""

    tokens: int
    bytes: int  # of one
    conversations: int  # that fit into memory
    disk_bytes: int  # of one
    disk_conversations: int | None  # that fit on the disk; None: no size was given


@dataclass(frozen=True)
class PrecisionForecast:
    """One precision."""

    k: str
    v: str
    token_bytes: float
    kv_bytes: int  # that are left for KV
    tokens: int | None  # of one conversation that takes all of it; None: tokens take no memory
    longest_tokens: int  # of one request that runs, by memory and context
    longest_live_tokens: int  # with --kv-cache-live
    capacities: tuple[ConversationCapacity, ...]
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@dataclass(frozen=True)
class Forecast:
    shares: MemoryPlan  # at full precision
    token_bytes: int  # at full precision
    sequence_bytes: int  # of each running request, whatever its length: windows and recurrent states
    checkpoint_bytes: int  # of one resume point at full precision; 0: the model needs none
    max_checkpoints: int
    rows: tuple[PrecisionForecast, ...]
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
    scratch = scratch or expected_scratch(outline, rows=EngineLimits.max_running)
    rows, refused = [], []
    fitting = [length for length in lengths if length <= outline.context_tokens] or [outline.context_tokens]
    for k, v in precisions if _can_be_stored(outline.layout) else (("raw", "raw"),):
        storage = KvConfig(k=parse(k), v=parse(v))
        try:
            plan = make_plan(outline.layout, storage.k, storage.v)
        except ConfigError as error:
            refused.append(f"{k}/{v}: {error}")
            continue
        shares = _shares(outline, limit_bytes, scratch, storage)
        rows.append(_row(outline, storage, plan, shares, fitting, disk_bytes))
    layout = outline.layout
    return Forecast(
        shares=_shares(outline, limit_bytes, scratch, KvConfig()),
        token_bytes=layout.token_bytes,
        sequence_bytes=layout.fixed_bytes,
        checkpoint_bytes=_checkpoint_bytes(layout, raw_plan(layout), outline.context_tokens),
        max_checkpoints=KvConfig.max_checkpoints,
        rows=tuple(rows),
        refused=tuple(refused),
    )


def advise(found: Forecast, *, tokens: int, conversations: int) -> PrecisionForecast | None:
    """The most exact row that holds so many conversations of so many tokens; None: none does."""
    return next((row for row in found.rows if _holds(row, tokens, conversations)), None)


def needs_live(row: PrecisionForecast, tokens: int) -> bool:
    """Whether a request of so many tokens runs only if its own KV is encoded too."""
    return row.longest_tokens < tokens <= row.longest_live_tokens


def _holds(row: PrecisionForecast, tokens: int, conversations: int) -> bool:
    fits = next((each.conversations for each in row.capacities if each.tokens == tokens), 0)
    return fits >= conversations and max(row.longest_tokens, row.longest_live_tokens) >= tokens


def _row(
    outline: Outline,
    storage: KvConfig,
    plan: Plan,
    shares: MemoryPlan,
    lengths: Sequence[int],
    disk_bytes: int | None,
) -> PrecisionForecast:
    layout, kv_bytes = outline.layout, max(0, shares.kv_bytes)
    token_bytes = plan.token_bytes(layout) or float(layout.token_bytes)
    marks_bytes = KvConfig.max_checkpoints * _checkpoint_bytes(layout, plan, outline.context_tokens)
    return PrecisionForecast(
        k=storage.k.name,
        v=storage.v.name,
        token_bytes=token_bytes,
        kv_bytes=kv_bytes,
        tokens=int(max(0, kv_bytes - marks_bytes) / token_bytes) if token_bytes else None,
        longest_tokens=_longest(outline, storage, kv_bytes, live=False),
        longest_live_tokens=_longest(outline, storage, kv_bytes, live=True),
        capacities=tuple(_stored(layout, plan, tokens, kv_bytes, disk_bytes) for tokens in lengths),
        flags=_flags(storage),
    )


def _stored(layout: Layout, plan: Plan, tokens: int, kv_bytes: int, disk_bytes: int | None) -> ConversationCapacity:
    token_bytes = plan.token_bytes(layout) or float(layout.token_bytes)
    one = math.ceil(tokens * token_bytes) + KvConfig.max_checkpoints * _checkpoint_bytes(layout, plan, tokens)
    on_disk = one + math.ceil(tokens / BLOCK_TOKENS) * BLOCK_OVERHEAD_BYTES
    return ConversationCapacity(
        tokens, one, kv_bytes // one, on_disk, None if disk_bytes is None else disk_bytes // on_disk
    )


def _checkpoint_bytes(layout: Layout, plan: Plan, tokens: int) -> int:
    """Of one point that a stored conversation can be resumed at: rings and chunks as they are stored, and states."""
    total = 0.0
    for spec, (k, v) in zip(layout.flat(), plan.pairs, strict=True):
        if spec.kind in ("window", "chunked"):
            bits = bits_of(k, spec.k_dim, spec.dtype) * spec.k_dim + bits_of(v, spec.v_dim, spec.dtype) * spec.v_dim
            total += min(spec.max_size, tokens) * spec.kv_heads * bits / 8
        elif spec.kind == "recurrent":
            total += spec.state_bytes
    return math.ceil(total)


def _longest(outline: Outline, storage: KvConfig, kv_bytes: int, *, live: bool) -> int:
    """By the same rungs that a server admits requests by."""
    layout = outline.layout
    budget = Budget(kv_bytes, layout.fixed_bytes, layout.token_bytes)
    if kv_bytes < budget.bytes_for(1):
        return 0
    if not layout.token_bytes:
        return outline.context_tokens
    chunk = MAX_CHUNK_CPU if outline.backend == "cpu" else MAX_CHUNK_GPU
    held = KvConfig(k=storage.k, v=storage.v, live=live and _can_be_stored(layout))
    return max(0, min(outline.context_tokens, budget.most_tokens(make_formats(layout, held, chunk)[0])))


def _shares(outline: Outline, limit_bytes: int, scratch: Scratch, storage: KvConfig) -> MemoryPlan:
    return plan_memory(
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


def _flags(storage: KvConfig) -> tuple[str, ...]:
    k, v = storage.k.name, storage.v.name
    if k == v == "raw":
        return ()
    if k == v == "planes:8":
        return ("--kv-cache-quantization",)
    if k == v and k.startswith("planes:"):
        return ("--kv-cache-bits", k.removeprefix("planes:"))
    return ("--kv-cache-k", k, "--kv-cache-v", v)


DEFAULT_SHARE = 0.75

# Kept free beside what passes were seen to take: for what the disk sends ahead, and for the allocator's rounding.
SPARE_SHARE = 0.1

# MLX keeps freed buffers for the next allocation of that size; more than this goes back to the system. One part in so
# many of what the weights leave: buffers of passes, which would otherwise come back as pages to be cleared. On CUDA the
# arrays of many operations are alive at once, and one pass that has to ask the driver for them takes 60 ms longer.
ALLOCATOR_CACHE_SHARE = 16

MAX_ALLOCATOR_CACHE_BYTES = 512 << 20

MAX_ALLOCATOR_CACHE_BYTES_CUDA = 4096 << 20


@dataclass(frozen=True)
class ScratchLine:
    """Bytes that some work takes beside KV, over the tokens that it reads."""

    base_bytes: int
    token_bytes: float = 0.0
    of_all_rows: bool = False  # it reads all KV there is; otherwise one sequence's, which the context bounds

    def bytes_for(self, kv_bytes: int, token_bytes: float, context_tokens: int) -> int:
        tokens = kv_bytes / max(1, token_bytes)
        return self.base_bytes + int(self.token_bytes * (tokens if self.of_all_rows else min(tokens, context_tokens)))

    def kv_bytes(self, free_bytes: int, token_bytes: float, context_tokens: int) -> int:
        """What is left for KV: one sequence may have all of it, or be as long as the model allows."""
        free_bytes -= self.base_bytes
        left = int(free_bytes / (1 + self.token_bytes / max(1, token_bytes)))
        return left if self.of_all_rows else max(left, free_bytes - int(self.token_bytes * context_tokens))


@dataclass(frozen=True)
class Scratch:
    """What forward passes and work on stored KV take beside KV: never two of them at once."""

    lines: tuple[ScratchLine, ...] = ()

    def bytes_for(self, kv_bytes: int, token_bytes: float, context_tokens: int) -> int:
        return max((line.bytes_for(kv_bytes, token_bytes, context_tokens) for line in self.lines), default=0)

    def kv_bytes(self, free_bytes: int, token_bytes: float, context_tokens: int) -> int:
        """The most KV that leaves room for the scratch that goes with it."""
        return min((line.kv_bytes(free_bytes, token_bytes, context_tokens) for line in self.lines), default=free_bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """What a memory limit consists of."""

    limit_bytes: int
    weight_bytes: int
    allocator_cache_bytes: int  # freed, and kept by MLX for the next array of that size
    scratch_bytes: int  # of passes and of work on stored KV, at most
    spare_bytes: int
    kv_bytes: int

    @property
    def run_ahead_bytes(self) -> int:
        """While less than this is alive MLX may start operations before others have ended: their arrays are then alive
        at once. Past it one operation at a time is what the scratch was measured for."""
        return self.limit_bytes - self.allocator_cache_bytes - self.scratch_bytes


def plan_memory(
    limit_bytes: int,
    weight_bytes: int,
    scratch: Scratch,
    *,
    token_bytes: float,
    context_tokens: int,
    backend: MlxBackend,
) -> MemoryPlan:
    """`token_bytes`: the least that a token of KV takes: the more tokens there are, the more is read."""
    free_bytes = limit_bytes - weight_bytes
    cache_bytes = max(0, min(_most_cached(backend), free_bytes // ALLOCATOR_CACHE_SHARE))
    spare_bytes = max(0, int(free_bytes * SPARE_SHARE))
    kv_bytes = scratch.kv_bytes(free_bytes - cache_bytes - spare_bytes, token_bytes, context_tokens)
    scratch_bytes = scratch.bytes_for(max(0, kv_bytes), token_bytes, context_tokens)
    return MemoryPlan(limit_bytes, weight_bytes, cache_bytes, scratch_bytes, spare_bytes, kv_bytes)


def _most_cached(backend: MlxBackend) -> int:
    return MAX_ALLOCATOR_CACHE_BYTES_CUDA if backend == "cuda" else MAX_ALLOCATOR_CACHE_BYTES


def limit_for(
    kv_bytes: int,
    weight_bytes: int,
    scratch: Scratch,
    *,
    token_bytes: float,
    context_tokens: int,
    backend: MlxBackend,
) -> int:
    """The limit that leaves so many bytes for KV. The reverse of `share_memory`."""
    used_bytes = kv_bytes + scratch.bytes_for(kv_bytes, token_bytes, context_tokens)
    shared = used_bytes / (1 - SPARE_SHARE - 1 / ALLOCATOR_CACHE_SHARE)
    capped = (used_bytes + _most_cached(backend)) / (1 - SPARE_SHARE)
    return weight_bytes + int(min(shared, capped)) + ALLOCATOR_CACHE_SHARE


def make_budget(layout: Layout, shares: MemoryPlan) -> Budget:
    budget = Budget(shares.kv_bytes, layout.fixed_bytes, layout.token_bytes)
    if shares.kv_bytes < budget.bytes_for(1):
        raise ConfigError(
            f"A memory limit of {shares.limit_bytes // MIB} MiB leaves no room for a KV cache beside the model's own "
            f"{shares.weight_bytes // MIB} MiB and the {shares.scratch_bytes // MIB} MiB that a step takes. Raise "
            "--memory-limit, or serve a smaller model."
        )
    return budget


# Largest prefill chunk: past these sizes a chunk gets no faster by token, only longer.
MAX_CHUNK_CPU = 256

MAX_CHUNK_GPU = 2048

# Arrays of logits that drawing tokens has alive at once; seen with every sampling option on.
LOGITS_COPIES = 10

# More than what was seen: what is alive in a larger chunk is told from smaller ones.
LEEWAY = 1.2

LOGIT_BYTES = 4
