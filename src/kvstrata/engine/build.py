"""Startup: probe the model, plan memory, open tiers, construct the engine core."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.codecs.registry import parse
from kvstrata.engine.admission import Admission, MemoryAccount
from kvstrata.engine.background import BackgroundPacer
from kvstrata.engine.budget import Budget, FormatCatalog, least_token_bytes, sealed_pairs
from kvstrata.engine.config import EngineLimits, KvConfig, TierConfig
from kvstrata.engine.executor import EngineCore, StepExecutor
from kvstrata.engine.memory_plan import DEFAULT_SHARE, MemoryPlan, make_budget, plan_memory
from kvstrata.engine.prefix_lookup import PrefixLookup
from kvstrata.engine.profiling import PassShape, max_chunk, measure_prefill, remembered_scratch, warm_up_kernels
from kvstrata.engine.request import Request
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.scheduler import UNMEASURED, PassCost
from kvstrata.engine.sequence import SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.kv.layout import Layout
from kvstrata.kv.packing import count_labels
from kvstrata.kv.precision_plan import make_plan
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe
from kvstrata.platform.device import device, max_arrays
from kvstrata.platform.logging import begin
from kvstrata.platform.memory import map_large_buffers
from kvstrata.prefix_cache.config import CacheLimits
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.prefix_cache.keys import Identity, chain
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.sharing import SharedTierClient
from kvstrata.prefix_cache.tier_client import Post, TierClient, without_tier
from kvstrata.text.detokenizer import Detokenizer, SpecialTokens, special_tokens
from kvstrata.tiers.block import BLOCK_TOKENS
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.options import DiskOptions, RemoteOptions
from kvstrata.tiers.remote.tier import RemoteTier

# Share of the arrays that a machine allows, for cached spans. The rest is for weights, running sequences and passes.
CACHED_ARRAYS = 0.75

# Divisor of the memory for KV: the limit of what is read from the disk ahead of its use.
READ_AHEAD_SHARE = 8

# Size limit of a shared block, as a multiple of what a model computes for its tokens: codecs add scales and means.
BLOCK_MARGIN = 2

# Prompt ids that the first word of a plain completion's text may depend on.
CONTEXT_IDS = 8

Clock = Callable[[], float]


@dataclass(frozen=True)
class ServedModel:
    """Served model, the limits within which it runs, and measurements of the start."""

    loaded: LoadedModel
    layout: Layout
    memory_plan: MemoryPlan
    budget: Budget
    limits: EngineLimits
    kv_config: KvConfig
    pass_cost: PassCost = UNMEASURED

    @property
    def context_tokens(self) -> int:
        """Longest context of a request."""
        return self.limits.longest_context(self.loaded.context_tokens)

    @property
    def chunk_tokens(self) -> int:
        """Size of the largest prompt chunk."""
        return self.limits.prefill_chunk_tokens or max_chunk()

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        return special_tokens(self.loaded.tokenizer)

    def make_detokenizer(self, request: Request) -> Detokenizer:
        """Return a detokenizer for the reply to this request."""
        context = request.prompt[-CONTEXT_IDS:] if request.continues_prompt else ()
        return Detokenizer(self.loaded.tokenizer, context, special=self.special_tokens)


@dataclass(frozen=True)
class OpenTiers:
    """Tiers below memory, and a listener for changes of the cache."""

    disk: TierClient
    shared: SharedTierClient | None = None
    listener: CacheListener | None = None


def prepare_model(loaded: LoadedModel, limits: EngineLimits, kv_config: KvConfig) -> ServedModel:
    """Probe a model, measure its passes, and plan memory. Sets MLX's memory limits.

    Raise ModelError for a model that cannot run, ConfigError for a memory limit that is too small.
    """
    map_large_buffers()
    if limits.wired_bytes:
        mx.set_wired_limit(limits.wired_bytes)
    begin("kernels", "Loading kernels (compiled at the first start)")
    cpu_step.warm_up()
    begin("probe", "Trying how the model can be batched")
    layout = probe(loaded.module, limits.max_kv_size)
    warm_up_kernels(layout)
    limit_bytes = limits.memory_bytes or _default_limit_bytes()
    runner = ModelRunner(loaded.module, layout)
    token_bytes = least_token_bytes(layout, kv_config)
    context_tokens = limits.longest_context(loaded.context_tokens)
    most_tokens = (limit_bytes - loaded.weight_bytes) // max(1, token_bytes)
    shape = PassShape(
        rows=limits.max_running,
        vocab_size=loaded.vocab_size,
        max_context_tokens=int(min(most_tokens, context_tokens)),
        chunk_tokens=limits.prefill_chunk_tokens or max_chunk(),
        pairs=sealed_pairs(layout, kv_config),
    )
    begin("memory", "Measuring what forward passes take (remembered for the next start)")
    plan = plan_memory(
        limit_bytes,
        loaded.weight_bytes,
        remembered_scratch(loaded, runner, shape),
        token_bytes=token_bytes,
        context_tokens=context_tokens,
        backend=device().backend,
    )
    budget = make_budget(layout, plan)
    mx.set_cache_limit(plan.allocator_cache_bytes)
    mx.set_memory_limit(plan.run_ahead_bytes)
    begin("speed", "Timing a short prompt")
    pass_cost = measure_prefill(runner, min(shape.chunk_tokens, shape.max_context_tokens))
    served = ServedModel(loaded, layout, plan, budget, limits, kv_config, pass_cost)
    _ = served.special_tokens  # finding them renders the chat template: no first token should wait for that
    return served


def _default_limit_bytes() -> int:
    machine = device()
    return min(int(machine.memory_bytes * DEFAULT_SHARE), machine.working_set_bytes)


def open_tiers(served: ServedModel, tiers: TierConfig, post: Post) -> OpenTiers:
    """Open the tiers. `post` has the engine thread run a function.

    Raise ConfigError for a tier that cannot be used.
    """
    begin("tiers", "Opening the disk cache" if tiers.disk else "Making the cache")
    disk = _open_disk_tier(served, tiers.disk, tiers.files, post)
    try:
        return OpenTiers(disk, _open_shared_tier(served, tiers.remote, post), tiers.listener)
    except BaseException:
        disk.tier.close()
        raise


def _open_disk_tier(served: ServedModel, disk: DiskOptions | None, files: Filesystem | None, post: Post) -> TierClient:
    """Open the disk tier. `files`: how the disk's files are read and written; None: as the system does."""
    if disk is None or any(spec.kind == "foreign" for spec in served.layout.flat()):
        return without_tier(served.layout)
    pinned: set[bytes] = set()
    # Half of the blocks that are read ahead wait in the tier, half in the cache.
    ahead_bytes = min(disk.read_ahead_bytes, served.budget.total_bytes // READ_AHEAD_SHARE // 2)
    options = dataclasses.replace(disk, ttl_s=served.kv_config.ttl_s, read_ahead_bytes=ahead_bytes)
    tier = DiskTier(options, chain=chain, tally=count_labels, is_pinned=pinned.__contains__, files=files)
    return TierClient(tier, served.layout, post=post, pinned=pinned, patience_s=disk.wait_s)


def _open_shared_tier(served: ServedModel, remote: RemoteOptions | None, post: Post) -> SharedTierClient | None:
    """Open the tier that other servers share.

    Raise ConfigError if its server cannot be used, or if the model's layers cannot be cached in its precision.
    """
    if remote is None or any(spec.kind == "foreign" for spec in served.layout.flat()):
        return None
    codec = parse(remote.precision)
    plan = make_plan(served.layout, codec, codec)
    ahead_bytes = min(remote.read_ahead_bytes, served.budget.total_bytes // READ_AHEAD_SHARE // 2)
    largest_bytes = BLOCK_MARGIN * (BLOCK_TOKENS * served.layout.token_bytes + served.layout.fixed_bytes)
    options = dataclasses.replace(remote, read_ahead_bytes=ahead_bytes, max_block_bytes=largest_bytes)
    tier = RemoteTier(options, chain=chain, backend=device().backend)
    return SharedTierClient(TierClient(tier, served.layout, post=post, patience_s=0.0), tier, plan)


def build_core(
    served: ServedModel,
    tiers: OpenTiers,
    metrics: Metrics,
    clock: Clock = time.monotonic,
    *,
    replaced: EngineCore | None = None,
) -> EngineCore:
    """Construct the engine core with an empty cache. Expiry, eviction, admission and pacing read `clock`.

    `replaced`: a core with a broken cache, whose runner and speeds are still good; None: new ones.
    Raise ConfigError for a precision that the model's layers cannot be cached in.
    """
    limits, kv_config, disk = served.limits, served.kv_config, tiers.disk
    catalog = FormatCatalog(served.layout, kv_config, served.chunk_tokens)
    prefix_cache = PrefixCache(
        served.layout,
        identity_of(served),
        kv_config,
        _cache_limits(served),
        catalog.plan_of,
        disk=disk,
        shared=tiers.shared,
        listener=tiers.listener,
        clock=clock,
    )
    sequences = SequenceTable()
    if replaced is not None:
        runner, speeds = replaced.runner, replaced.speeds
    else:
        runner, speeds = ModelRunner(served.loaded.module, served.layout), _new_speeds(served, metrics)
    prefixes = PrefixLookup(prefix_cache, runner, checkpoint_every_tokens=kv_config.checkpoint_every_tokens)
    memory = MemoryAccount(
        served.budget.with_formats(catalog, prefix_cache.requantizer.target),
        *(sequences.running, prefix_cache.table, prefixes),
        buffer_step_tokens=limits.buffer_step_tokens,
        keeps_growth_free=disk.has_tier,
    )
    admission = Admission(
        *(prefix_cache, sequences, memory, prefixes, speeds),
        max_running=limits.max_running,
        max_batched_context=_max_batched_context(served),
        mixes=runner.mixes,
        clock=clock,
    )
    pacer = BackgroundPacer(prefix_cache, sequences, memory, speeds, runner, slice_s=limits.slice_s, clock=clock)
    executor = StepExecutor(
        *(sequences, admission, prefixes, runner, speeds, pacer, metrics, served.make_detokenizer),
        vocab_size=served.loaded.vocab_size,
    )
    return EngineCore(prefix_cache, sequences, runner, speeds, prefixes, admission, pacer, executor, catalog)


def _new_speeds(served: ServedModel, metrics: Metrics) -> StepSpeeds:
    limits = served.limits
    return StepSpeeds(
        metrics,
        share=limits.prefill_share,
        max_chunk=max_chunk(),
        fixed_chunk=limits.prefill_chunk_tokens,
        pass_cost=served.pass_cost,
    )


def _max_batched_context(served: ServedModel) -> int:
    """Return the tokens that several chunks of one pass may read. Scratch memory was measured with one sequence:
    several chunks take no more if they read no more than one sequence may. Each would take a window of its own."""
    if any(spec.kind != "full" for spec in served.layout.flat()):
        return 0
    return min(served.context_tokens, served.budget.most_tokens())


def identity_of(served: ServedModel) -> Identity:
    """Return the identity of the KV that this model computes."""
    signature = tuple(spec.signature for spec in served.layout.flat())
    return Identity(served.loaded.fingerprint, served.loaded.dtype, signature, served.limits.max_kv_size)


def _cache_limits(served: ServedModel) -> CacheLimits:
    config, allowed = served.kv_config, max_arrays()
    total_bytes = served.budget.total_bytes
    return CacheLimits(
        max_bytes=total_bytes if config.hot_bytes is None else min(config.hot_bytes, total_bytes),
        max_arrays=None if allowed is None else int(CACHED_ARRAYS * allowed),
    )
