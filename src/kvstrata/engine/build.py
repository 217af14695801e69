"""Startup: open tiers, construct the prefix cache and the engine core."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.backend import max_arrays
from kvstrata.codecs import paths
from kvstrata.codecs.registry import parse
from kvstrata.disk.files import Files
from kvstrata.disk.options import DiskOptions
from kvstrata.disk.tier import DiskTier
from kvstrata.engine.admission import Entrance, FirstInLine, MemoryAccount, Pacing, Planner, View
from kvstrata.engine.background import BackgroundPacer
from kvstrata.engine.budget import Budget, FormatCatalog, with_formats
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.executor import Endings, Loop, Membership, Passes, Replies
from kvstrata.engine.prefix_lookup import Fetching, Pinning, Resume
from kvstrata.engine.profiling import max_chunk
from kvstrata.engine.request import Request
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.sequence import SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.layers.kinds import Layout
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.prefix_cache.config import CacheConfig, LadderConfig, PrecisionFloors
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.prefix_cache.keys import Identity, chain
from kvstrata.prefix_cache.prefix_cache import Stock, make_stock
from kvstrata.prefix_cache.sharing import SharedTierClient
from kvstrata.prefix_cache.tier_client import Post, TierClient, without_tier
from kvstrata.remote.options import RemoteOptions
from kvstrata.remote.tier import RemoteTier
from kvstrata.spans.contents import tally
from kvstrata.spans.plan import edges_of, make_plan
from kvstrata.text.detokenizer import Detokenizer
from kvstrata.tier.block import BLOCK_TOKENS

# Of the arrays that a machine allows, for stored spans. The rest is for weights, running sequences and passes.
STORED_ARRAYS = 0.75

# Of the memory for KV, one part in so many: most that is read from the disk ahead of its use.
READ_AHEAD_SHARE = 8

# Of a shared block's tensors, over what a model computes for its tokens: codecs add scales and means.
BLOCK_MARGIN = 2


@dataclass(frozen=True)
class ServedModel:
    """What is served, and within which bounds."""

    loaded: LoadedModel
    layout: Layout
    budget: Budget
    limits: EngineLimits
    storage: KvConfig

    @property
    def chunk_tokens(self) -> int:
        """Of the largest chunk of a prompt."""
        return self.limits.prefill_chunk_tokens or max_chunk()


def open_disk_tier(served: ServedModel, disk: DiskOptions | None, files: Files | None, post: Post) -> TierClient:
    """`files`: how the disk's files are read and written; None: as the system does. Raises ConfigError where the folder
    cannot be used."""
    if disk is None or any(spec.kind == "foreign" for spec in served.layout.flat()):
        return without_tier(served.layout)
    pinned: set[bytes] = set()
    # Half of what may be ahead waits in the tier, half in the store.
    ahead_bytes = min(disk.read_ahead_bytes, served.budget.total_bytes // READ_AHEAD_SHARE // 2)
    options = dataclasses.replace(disk, ttl_s=served.storage.ttl_s, read_ahead_bytes=ahead_bytes)
    tier = DiskTier(options, chain=chain, tally=tally, is_pinned=pinned.__contains__, files=files)
    return TierClient(tier, served.layout, post=post, pinned=pinned, patience_s=disk.wait_s)


def open_shared_tier(
    served: ServedModel, remote: RemoteOptions | None, backend: str, post: Post
) -> SharedTierClient | None:
    """A tier that other servers share. Raises ConfigError where its store cannot be used, or the model's layers cannot
    be stored in its precision."""
    if remote is None or any(spec.kind == "foreign" for spec in served.layout.flat()):
        return None
    codec = parse(remote.precision)
    plan = make_plan(served.layout, codec, codec)
    ahead_bytes = min(remote.read_ahead_bytes, served.budget.total_bytes // READ_AHEAD_SHARE // 2)
    largest_bytes = BLOCK_MARGIN * (BLOCK_TOKENS * served.layout.token_bytes + served.layout.fixed_bytes)
    options = dataclasses.replace(remote, read_ahead_bytes=ahead_bytes, max_block_bytes=largest_bytes)
    tier = RemoteTier(options, chain=chain, backend=backend)
    return SharedTierClient(TierClient(tier, served.layout, post=post, patience_s=0.0), tier, plan)


def make_loop(
    served: ServedModel,
    metrics: Metrics,
    cold: TierClient,
    detokenizer: Callable[[Request], Detokenizer],
    shared: SharedTierClient | None = None,
    watcher: CacheListener | None = None,
    *,
    runner: ModelRunner | None = None,
    speeds: StepSpeeds | None = None,
) -> Loop:
    """Raises ConfigError for a precision that the model's layers cannot be stored in. `runner`, `speeds`: of the loop
    that this one takes over from, where the model is well; None: new ones."""
    limits, storage = served.limits, served.storage
    plans = FormatCatalog(served.layout, storage, served.chunk_tokens)
    stock = _make_stock(served, plans, cold, shared, watcher)
    runner, sequences = runner or ModelRunner(served.loaded.module, served.layout), SequenceTable()
    capacity = MemoryAccount(
        with_formats(served.budget, plans, stock.requantizer.target),
        sequences.running,
        stock.table,
        tail_step_tokens=limits.buffer_step_tokens,
        keeps_growth_free=cold.has_tier,
    )
    fetching = Fetching(stock.prefetcher, stock.reclaimer, stock.table, stock.failures)
    resume = Resume(
        stock.store,
        stock.evictor,
        stock.explainer,
        stock.transcoder.precision,
        Pinning(stock.pins, stock.table, served.layout.token_bytes),
        stock.failures,
        fetching=fetching,
        mark_every_tokens=storage.checkpoint_every_tokens,
        shared_marks=runner.disband if shared is not None else None,
    )
    if speeds is None:
        speeds = StepSpeeds(
            metrics, share=limits.prefill_share, max_chunk=max_chunk(), fixed_chunk=limits.prefill_chunk_tokens
        )
    entrance = Entrance(stock.reclaimer, stock.leases, stock.failures, cold.patience_s)
    endings = Endings(sequences, resume, fetching, entrance, runner, metrics)
    first = FirstInLine(sequences, capacity, fetching, entrance, stock.shortening, stock.failures)
    pacing = Pacing(speeds, limits.max_running, _joined_context(served), runner.mixes)
    return Loop(
        stock=stock,
        plans=plans,
        sequences=sequences,
        capacity=capacity,
        fetching=fetching,
        entrance=entrance,
        planner=Planner(sequences, View(sequences, capacity, resume, fetching), first, entrance, capacity, pacing),
        membership=Membership(sequences, capacity, resume, runner, metrics),
        passes=Passes(
            *(runner, sequences, resume, speeds, metrics),
            vocab_size=served.loaded.vocab_size,
            overlaps=paths.active() != "cpu",
        ),
        replies=Replies(sequences, resume, endings, speeds, metrics, detokenizer),
        endings=endings,
        housekeeping=BackgroundPacer(stock, sequences, capacity, speeds, runner, slice_s=limits.slice_s),
        speeds=speeds,
        runner=runner,
    )


def _joined_context(served: ServedModel) -> int:
    """What passes take was measured with one sequence. Several chunks take no more if they read no more than one
    sequence may; of windows each would take its own."""
    if any(spec.kind != "full" for spec in served.layout.flat()):
        return 0
    context_tokens = served.limits.context_tokens or served.loaded.context_tokens
    return min(context_tokens, served.loaded.context_tokens, served.budget.most_tokens())


def identity_of(served: ServedModel) -> Identity:
    signature = tuple(spec.signature for spec in served.layout.flat())
    return Identity(served.loaded.fingerprint, served.loaded.dtype, signature, served.limits.max_kv_size)


def _make_stock(
    served: ServedModel,
    plans: FormatCatalog,
    cold: TierClient,
    shared: SharedTierClient | None,
    watcher: CacheListener | None,
) -> Stock:
    options = _store_options(served)
    return make_stock(
        served.layout, identity_of(served), options, plans.plan_of, cold=cold, shared=shared, watcher=watcher
    )


def _store_options(served: ServedModel) -> CacheConfig:
    storage, allowed = served.storage, max_arrays()
    total_bytes = served.budget.total_bytes
    return CacheConfig(
        hot_bytes=total_bytes if storage.hot_bytes is None else min(storage.hot_bytes, total_bytes),
        disk_write=storage.disk_write,
        max_arrays=None if allowed is None else int(STORED_ARRAYS * allowed),
        max_checkpoints=storage.max_checkpoints,
        ttl_s=storage.ttl_s,
        precision=dataclasses.replace(
            storage, gathers=allowed is not None, apart=edges_of(served.layout, storage.edge_layers)
        ),
        ladder=LadderConfig(
            by_pressure=storage.dynamic,
            by_length=storage.dynamic_at,
            floors=PrecisionFloors(storage.floor_k_bits, storage.floor_v_bits),
        ),
    )
