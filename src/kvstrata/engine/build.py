"""Startup: open tiers, construct the prefix cache and the engine core."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.backend import max_arrays
from kvstrata.codecs.registry import parse
from kvstrata.disk.files import Files
from kvstrata.disk.options import DiskOptions
from kvstrata.disk.tier import DiskTier
from kvstrata.engine.admission import Admission, MemoryAccount
from kvstrata.engine.background import BackgroundPacer
from kvstrata.engine.budget import Budget, FormatCatalog
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.executor import EngineCore, StepExecutor
from kvstrata.engine.prefix_lookup import PrefixLookup
from kvstrata.engine.profiling import max_chunk
from kvstrata.engine.request import Request
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.sequence import SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.layers.kinds import Layout
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.prefix_cache.config import CacheLimits
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.prefix_cache.keys import Identity, chain
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.sharing import SharedTierClient
from kvstrata.prefix_cache.tier_client import Post, TierClient, without_tier
from kvstrata.remote.options import RemoteOptions
from kvstrata.remote.tier import RemoteTier
from kvstrata.spans.contents import tally
from kvstrata.spans.plan import edges_of, make_plan
from kvstrata.text.detokenizer import Detokenizer
from kvstrata.tier.block import BLOCK_TOKENS

# Share of the arrays that a machine allows, for cached spans. The rest is for weights, running sequences and passes.
CACHED_ARRAYS = 0.75

# Divisor of the memory for KV: the limit of what is read from the disk ahead of its use.
READ_AHEAD_SHARE = 8

# Size limit of a shared block, as a multiple of what a model computes for its tokens: codecs add scales and means.
BLOCK_MARGIN = 2


@dataclass(frozen=True)
class ServedModel:
    """Served model, and the limits within which it runs."""

    loaded: LoadedModel
    layout: Layout
    budget: Budget
    limits: EngineLimits
    kv_config: KvConfig

    @property
    def chunk_tokens(self) -> int:
        """Size of the largest prompt chunk."""
        return self.limits.prefill_chunk_tokens or max_chunk()


def open_disk_tier(served: ServedModel, disk: DiskOptions | None, files: Files | None, post: Post) -> TierClient:
    """Open the disk tier. `files`: how the disk's files are read and written; None: as the system does.

    Raise ConfigError if the folder cannot be used.
    """
    if disk is None or any(spec.kind == "foreign" for spec in served.layout.flat()):
        return without_tier(served.layout)
    pinned: set[bytes] = set()
    # Half of the blocks that are read ahead wait in the tier, half in the cache.
    ahead_bytes = min(disk.read_ahead_bytes, served.budget.total_bytes // READ_AHEAD_SHARE // 2)
    options = dataclasses.replace(disk, ttl_s=served.kv_config.ttl_s, read_ahead_bytes=ahead_bytes)
    tier = DiskTier(options, chain=chain, tally=tally, is_pinned=pinned.__contains__, files=files)
    return TierClient(tier, served.layout, post=post, pinned=pinned, patience_s=disk.wait_s)


def open_shared_tier(
    served: ServedModel, remote: RemoteOptions | None, backend: str, post: Post
) -> SharedTierClient | None:
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
    tier = RemoteTier(options, chain=chain, backend=backend)
    return SharedTierClient(TierClient(tier, served.layout, post=post, patience_s=0.0), tier, plan)


def build_core(
    served: ServedModel,
    metrics: Metrics,
    disk: TierClient,
    detokenizer_for: Callable[[Request], Detokenizer],
    shared: SharedTierClient | None = None,
    listener: CacheListener | None = None,
    *,
    runner: ModelRunner | None = None,
    speeds: StepSpeeds | None = None,
) -> EngineCore:
    """Construct the engine core with an empty cache. `runner` and `speeds` come from the core that this one replaces,
    if its model works; None: new ones.

    Raise ConfigError for a precision that the model's layers cannot be cached in.
    """
    limits, storage = served.limits, served.kv_config
    catalog = FormatCatalog(served.layout, storage, served.chunk_tokens)
    prefix_cache = PrefixCache(
        served.layout,
        identity_of(served),
        storage,
        _cache_limits(served),
        catalog.plan_of,
        disk=disk,
        shared=shared,
        listener=listener,
    )
    runner, sequences = runner or ModelRunner(served.loaded.module, served.layout), SequenceTable()
    if speeds is None:
        speeds = StepSpeeds(
            metrics, share=limits.prefill_share, max_chunk=max_chunk(), fixed_chunk=limits.prefill_chunk_tokens
        )
    prefixes = PrefixLookup(prefix_cache, runner, checkpoint_every_tokens=storage.checkpoint_every_tokens)
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
    )
    pacer = BackgroundPacer(prefix_cache, sequences, memory, speeds, runner, slice_s=limits.slice_s)
    executor = StepExecutor(
        *(sequences, admission, prefixes, runner, speeds, pacer, metrics, detokenizer_for),
        vocab_size=served.loaded.vocab_size,
    )
    return EngineCore(prefix_cache, sequences, runner, speeds, prefixes, admission, pacer, executor, catalog)


def _max_batched_context(served: ServedModel) -> int:
    """Return the tokens that several chunks of one pass may read. Scratch memory was measured with one sequence:
    several chunks take no more if they read no more than one sequence may. Each would take a window of its own."""
    if any(spec.kind != "full" for spec in served.layout.flat()):
        return 0
    context_tokens = served.limits.context_tokens or served.loaded.context_tokens
    return min(context_tokens, served.loaded.context_tokens, served.budget.most_tokens())


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
        layers_apart=edges_of(served.layout, config.edge_layers),
    )
