"""Memory plan: divides a limit among weights, KV and scratch, before and after loading.

`plan_memory` divides a limit once scratch was measured. `forecast` does the same from a model's headers alone, with an
expected scratch, for every precision; `advise` chooses among its precisions. Pure: nothing here runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.codecs.registry import parse
from kvstrata.engine.budget import (
    MIB,
    Budget,
    least_token_bytes,
    make_formats,
)
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.errors import ConfigError
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.precision_plan import PrecisionPlan, bits_of, make_plan, raw_plan
from kvstrata.models.outline import ModelOutline
from kvstrata.platform.device import MlxBackend
from kvstrata.tiers.block import BLOCK_TOKENS

# Memory limit without a setting, as a share of the device's memory.
DEFAULT_SHARE = 0.75

# Share of the limit beside the weights that stays free beyond the measured scratch: for blocks that a tier sends ahead
# of their use, and for the allocator's rounding.
SPARE_SHARE = 0.1

# MLX keeps freed buffers for the next allocation of their size, and returns more than this to the system: one part in
# 16 of the limit beside the weights. Without these buffers a pass would get pages that the system first has to clear.
# On CUDA the arrays of many operations are alive at once, and a pass that asks the driver for them takes 60 ms longer.
ALLOCATOR_CACHE_SHARE = 16
MAX_ALLOCATOR_CACHE_BYTES = 512 << 20
MAX_ALLOCATOR_CACHE_BYTES_CUDA = 4096 << 20

# Largest prefill chunk: past these sizes a longer chunk takes as much time for each token.
MAX_CHUNK_CPU = 256
MAX_CHUNK_GPU = 2048

# Arrays of logits that are alive at once while tokens are drawn; measured with every sampling option on.
LOGITS_COPIES = 10
LOGIT_BYTES = 4

# Factor over the measured scratch, because the scratch of a large chunk is extrapolated from smaller ones.
LEEWAY = 1.2

FLOAT_BYTES = 4

# Attention scores of a chunk, on a CPU: the scores and their softmax are in part alive at once.
SCORES_COPIES = 1.45

# With sinks, and in models whose layers run one sequence at a time, MLX's own attention is used, which copies more.
PLAIN_SCORES_COPIES = 2.9

# Arrays as wide as the widest layer that are alive at once: a gate, its operand, and their product.
WIDE_COPIES = 3

# Copies of one layer's keys and values as float32: decoded, and on a GPU also joined with those of the chunk.
LAYER_COPIES_CPU = 1
LAYER_COPIES_GPU = 3

# Precisions of a forecast (K and V), as docs/quality.md recommends them; the most exact first.
PRECISIONS = (("raw", "raw"), ("planes:8", "planes:8"), ("planes:8", "planes:4"), ("planes:4", "planes:4"))

# Lengths of a forecast's conversations.
LENGTHS = (8192, 32768)

# Header and padding of a block in its file.
BLOCK_OVERHEAD_BYTES = 8192


@dataclass(frozen=True)
class ScratchLine:
    """Scratch memory of one kind of work, as a linear function of the tokens that the work reads."""

    base_bytes: int
    token_bytes: float = 0.0
    of_all_rows: bool = False  # reads the KV of all sequences; otherwise of one, which the context bounds

    def bytes_for(self, kv_bytes: int, token_bytes: float, context_tokens: int) -> int:
        """Return the scratch beside `kv_bytes` of KV, whose tokens take `token_bytes` each."""
        tokens = kv_bytes / max(1, token_bytes)
        return self.base_bytes + int(self.token_bytes * (tokens if self.of_all_rows else min(tokens, context_tokens)))

    def kv_bytes(self, free_bytes: int, token_bytes: float, context_tokens: int) -> int:
        """Return the most KV for which KV and scratch together take at most `free_bytes`."""
        free_bytes -= self.base_bytes
        # One sequence may own all KV, or be as long as the context.
        most = int(free_bytes / (1 + self.token_bytes / max(1, token_bytes)))
        return most if self.of_all_rows else max(most, free_bytes - int(self.token_bytes * context_tokens))


@dataclass(frozen=True)
class Scratch:
    """Memory that forward passes and work on cached KV take beside KV. Only one of these runs at a time."""

    lines: tuple[ScratchLine, ...] = ()

    def bytes_for(self, kv_bytes: int, token_bytes: float, context_tokens: int) -> int:
        """Return the scratch of the largest line beside `kv_bytes` of KV."""
        return max((line.bytes_for(kv_bytes, token_bytes, context_tokens) for line in self.lines), default=0)

    def kv_bytes(self, free_bytes: int, token_bytes: float, context_tokens: int) -> int:
        """Return the most KV that leaves enough of `free_bytes` for every line."""
        return min((line.kv_bytes(free_bytes, token_bytes, context_tokens) for line in self.lines), default=free_bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """A memory limit, divided. The fields are those of `memory` in GET /props and in `kvstrata plan --json`."""

    limit_bytes: int
    weight_bytes: int
    allocator_cache_bytes: int  # freed buffers that MLX keeps for the next array of their size
    scratch_bytes: int  # most that passes and work on cached KV take
    spare_bytes: int
    kv_bytes: int

    @property
    def run_ahead_bytes(self) -> int:
        """Memory limit of MLX: below it MLX may start operations before earlier ones have ended.

        The arrays of such operations are alive at once. Above the limit MLX runs one operation at a time, and scratch
        was measured in that mode.
        """
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
    """Divide a limit. `token_bytes`: the least that a token of KV takes, because more tokens need more scratch."""
    free_bytes = limit_bytes - weight_bytes
    cache_bytes = max(0, min(_max_allocator_cache_bytes(backend), free_bytes // ALLOCATOR_CACHE_SHARE))
    spare_bytes = max(0, int(free_bytes * SPARE_SHARE))
    kv_bytes = scratch.kv_bytes(free_bytes - cache_bytes - spare_bytes, token_bytes, context_tokens)
    scratch_bytes = scratch.bytes_for(max(0, kv_bytes), token_bytes, context_tokens)
    return MemoryPlan(limit_bytes, weight_bytes, cache_bytes, scratch_bytes, spare_bytes, kv_bytes)


def limit_for(
    kv_bytes: int,
    weight_bytes: int,
    scratch: Scratch,
    *,
    token_bytes: float,
    context_tokens: int,
    backend: MlxBackend,
) -> int:
    """Return the limit that leaves `kv_bytes` for KV: the reverse of `plan_memory`."""
    used_bytes = kv_bytes + scratch.bytes_for(kv_bytes, token_bytes, context_tokens)
    uncapped = used_bytes / (1 - SPARE_SHARE - 1 / ALLOCATOR_CACHE_SHARE)
    capped = (used_bytes + _max_allocator_cache_bytes(backend)) / (1 - SPARE_SHARE)
    return weight_bytes + int(min(uncapped, capped)) + ALLOCATOR_CACHE_SHARE


def make_budget(layout: Layout, plan: MemoryPlan) -> Budget:
    """Return the budget for KV under this plan. Raises ConfigError where not even one token fits."""
    budget = Budget(plan.kv_bytes, layout.fixed_bytes, layout.token_bytes)
    if plan.kv_bytes < budget.bytes_for(1):
        raise ConfigError(
            f"A memory limit of {plan.limit_bytes // MIB} MiB leaves no room for a KV cache beside the model's own "
            f"{plan.weight_bytes // MIB} MiB and the {plan.scratch_bytes // MIB} MiB that a step takes. Raise "
            "--memory-limit, or serve a smaller model."
        )
    return budget


def _max_allocator_cache_bytes(backend: MlxBackend) -> int:
    return MAX_ALLOCATOR_CACHE_BYTES_CUDA if backend == "cuda" else MAX_ALLOCATOR_CACHE_BYTES


def expected_scratch(outline: ModelOutline, *, rows: int) -> Scratch:
    """Estimate the scratch of a model that is not loaded. `rows`: most requests in one batch."""
    layout, is_cpu = outline.layout, outline.backend == "cpu"
    chunk = MAX_CHUNK_CPU if is_cpu else MAX_CHUNK_GPU
    item_bytes = max((spec.dtype.size for spec in layout.flat() if spec.kv_heads), default=FLOAT_BYTES)
    wide_bytes = WIDE_COPIES * outline.widest * item_bytes
    scores_bytes = _score_bytes(outline) * chunk if is_cpu else 0.0  # for each token of the context
    copies = LAYER_COPIES_CPU if is_cpu else LAYER_COPIES_GPU
    layer_bytes = copies * max((_float_token_bytes(spec) for spec in layout.flat()), default=0)
    lines = [
        ScratchLine(LOGITS_COPIES * LOGIT_BYTES * rows * outline.vocab_size),
        ScratchLine(int(LEEWAY * chunk * max(wide_bytes, scores_bytes))),
        ScratchLine(int(LEEWAY * chunk * wide_bytes), LEEWAY * (scores_bytes + layer_bytes)),
    ]
    if layout.batching == "per_sequence" and any(spec.kind == "full" for spec in layout.flat()):
        # Every step joins the keys and values of all layers, and all of them are alive when the step ends.
        lines.append(ScratchLine(0, LEEWAY * layout.token_bytes, of_all_rows=True))
    return Scratch(tuple(lines))


def _score_bytes(outline: ModelOutline) -> float:
    """Return the bytes of the scores between one query token and one key token, in all heads."""
    is_recurrent = any(spec.kind == "recurrent" for spec in outline.layout.flat())
    is_plain = outline.layout.batching == "per_sequence" or is_recurrent
    return (PLAIN_SCORES_COPIES if is_plain else SCORES_COPIES) * FLOAT_BYTES * max(1, outline.num_heads)


def _float_token_bytes(spec: LayerSpec) -> int:
    """Return the bytes of a token's keys and values in one layer as float32."""
    return spec.kv_heads * (spec.k_dim + spec.v_dim) * FLOAT_BYTES


@dataclass(frozen=True)
class ConversationCapacity:
    """Cached conversations of one length: bytes of each, and how many fit."""

    tokens: int
    bytes: int
    conversations: int  # that fit into memory
    disk_bytes: int
    disk_conversations: int | None  # that fit on the disk; None: no size was given


@dataclass(frozen=True)
class PrecisionForecast:
    """Forecast of one precision."""

    k: str
    v: str
    token_bytes: float
    kv_bytes: int
    max_cached_tokens: int | None  # of one cached conversation that takes all KV memory; None: tokens take no memory
    max_request_tokens: int  # of one running request: memory and context bound it
    max_live_request_tokens: int  # with --kv-cache-live
    capacities: tuple[ConversationCapacity, ...]
    flags: tuple[str, ...]  # of `kvstrata serve`, that set this precision

    @property
    def name(self) -> str:
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@dataclass(frozen=True)
class Forecast:
    """Memory of a model that is not loaded, at each precision."""

    memory: MemoryPlan  # at full precision
    token_bytes: int  # at full precision
    sequence_bytes: int  # of each running request, whatever its length: windows and recurrent states
    checkpoint_bytes: int  # at full precision; 0: the model resumes anywhere
    max_checkpoints: int  # of a cached conversation
    precisions: tuple[PrecisionForecast, ...]  # the most exact first
    unsupported: tuple[str, ...]  # precisions that the model's layers cannot be encoded in, each with the reason


def forecast(
    outline: ModelOutline,
    limit_bytes: int,
    *,
    disk_bytes: int | None = None,
    precisions: Sequence[tuple[str, str]] = PRECISIONS,
    lengths: Sequence[int] = LENGTHS,
    scratch: Scratch | None = None,
) -> Forecast:
    """Forecast the memory of a model from its outline. `scratch`: measured earlier; None: expected.

    Raises ConfigError for an unknown precision.
    """
    layout = outline.layout
    scratch = scratch or expected_scratch(outline, rows=EngineLimits.max_running)
    in_context = [length for length in lengths if length <= outline.context_tokens] or [outline.context_tokens]
    supported: list[PrecisionForecast] = []
    unsupported: list[str] = []
    for k, v in precisions if _can_encode(layout) else (("raw", "raw"),):
        config = KvConfig(k=parse(k), v=parse(v))
        try:
            plan = make_plan(layout, config.k, config.v)
        except ConfigError as error:
            unsupported.append(f"{k}/{v}: {error}")
            continue
        kv_bytes = max(0, _expected_plan(outline, limit_bytes, scratch, config).kv_bytes)
        supported.append(_precision_forecast(outline, config, plan, kv_bytes, in_context, disk_bytes))
    return Forecast(
        memory=_expected_plan(outline, limit_bytes, scratch, KvConfig()),
        token_bytes=layout.token_bytes,
        sequence_bytes=layout.fixed_bytes,
        checkpoint_bytes=_checkpoint_bytes(layout, raw_plan(layout), outline.context_tokens),
        max_checkpoints=KvConfig.max_checkpoints,
        precisions=tuple(supported),
        unsupported=tuple(unsupported),
    )


def advise(result: Forecast, *, tokens: int, conversations: int) -> PrecisionForecast | None:
    """Return the most exact precision at which `conversations` of `tokens` each stay in memory; None: none does."""
    return next((each for each in result.precisions if _fits(each, tokens, conversations)), None)


def needs_live(precision: PrecisionForecast, tokens: int) -> bool:
    """Whether a request of this length runs only with --kv-cache-live."""
    return precision.max_request_tokens < tokens <= precision.max_live_request_tokens


def _fits(precision: PrecisionForecast, tokens: int, conversations: int) -> bool:
    capacity = next((each.conversations for each in precision.capacities if each.tokens == tokens), 0)
    can_run = max(precision.max_request_tokens, precision.max_live_request_tokens) >= tokens
    return can_run and capacity >= conversations


def _precision_forecast(
    outline: ModelOutline,
    config: KvConfig,
    plan: PrecisionPlan,
    kv_bytes: int,
    lengths: Sequence[int],
    disk_bytes: int | None,
) -> PrecisionForecast:
    layout = outline.layout
    token_bytes = plan.token_bytes(layout) or float(layout.token_bytes)
    checkpoints_bytes = KvConfig.max_checkpoints * _checkpoint_bytes(layout, plan, outline.context_tokens)
    return PrecisionForecast(
        k=config.k.name,
        v=config.v.name,
        token_bytes=token_bytes,
        kv_bytes=kv_bytes,
        max_cached_tokens=int(max(0, kv_bytes - checkpoints_bytes) / token_bytes) if token_bytes else None,
        max_request_tokens=_max_request_tokens(outline, config, kv_bytes, live=False),
        max_live_request_tokens=_max_request_tokens(outline, config, kv_bytes, live=True),
        capacities=tuple(_conversation_capacity(layout, plan, tokens, kv_bytes, disk_bytes) for tokens in lengths),
        flags=_flags(config),
    )


def _conversation_capacity(
    layout: Layout, plan: PrecisionPlan, tokens: int, kv_bytes: int, disk_bytes: int | None
) -> ConversationCapacity:
    token_bytes = plan.token_bytes(layout) or float(layout.token_bytes)
    one_bytes = math.ceil(tokens * token_bytes) + KvConfig.max_checkpoints * _checkpoint_bytes(layout, plan, tokens)
    one_disk_bytes = one_bytes + math.ceil(tokens / BLOCK_TOKENS) * BLOCK_OVERHEAD_BYTES
    on_disk = None if disk_bytes is None else disk_bytes // one_disk_bytes
    return ConversationCapacity(tokens, one_bytes, kv_bytes // one_bytes, one_disk_bytes, on_disk)


def _checkpoint_bytes(layout: Layout, plan: PrecisionPlan, tokens: int) -> int:
    """Return the bytes of a state checkpoint: windows and chunks as the plan encodes them, and recurrent states."""
    total = 0.0
    for spec, (k, v) in zip(layout.flat(), plan.pairs, strict=True):
        if spec.kind in ("window", "chunked"):
            bits = bits_of(k, spec.k_dim, spec.dtype) * spec.k_dim + bits_of(v, spec.v_dim, spec.dtype) * spec.v_dim
            total += min(spec.max_size, tokens) * spec.kv_heads * bits / 8
        elif spec.kind == "recurrent":
            total += spec.state_bytes
    return math.ceil(total)


def _max_request_tokens(outline: ModelOutline, config: KvConfig, kv_bytes: int, *, live: bool) -> int:
    """Return the longest request that a server would admit, by the KV formats that the server uses."""
    layout = outline.layout
    budget = Budget(kv_bytes, layout.fixed_bytes, layout.token_bytes)
    if kv_bytes < budget.bytes_for(1):
        return 0
    if not layout.token_bytes:
        return outline.context_tokens
    chunk = MAX_CHUNK_CPU if outline.backend == "cpu" else MAX_CHUNK_GPU
    running = KvConfig(k=config.k, v=config.v, encodes_running=live and _can_encode(layout))
    return max(0, min(outline.context_tokens, budget.most_tokens(make_formats(layout, running, chunk)[0])))


def _expected_plan(outline: ModelOutline, limit_bytes: int, scratch: Scratch, config: KvConfig) -> MemoryPlan:
    return plan_memory(
        limit_bytes,
        outline.weight_bytes,
        scratch,
        token_bytes=least_token_bytes(outline.layout, config),
        context_tokens=outline.context_tokens,
        backend=outline.backend,
    )


def _can_encode(layout: Layout) -> bool:
    """Whether KV of this model can be encoded: caches that a model brings itself stay as they are."""
    return all(spec.kind != "foreign" for spec in layout.flat())


def _flags(config: KvConfig) -> tuple[str, ...]:
    k, v = config.k.name, config.v.name
    if k == v == "raw":
        return ()
    if k == v == "planes:8":
        return ("--kv-cache-quantization",)
    if k == v and k.startswith("planes:"):
        return ("--kv-cache-bits", k.removeprefix("planes:"))
    return ("--cache-type-k", k, "--cache-type-v", v)
