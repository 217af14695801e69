"""Export and import of conversations as files, on worker threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np

from kvstrata.engine.executor import EngineCore
from kvstrata.engine.prompt_cache_file import PROMPT_NEEDED, PromptCacheReader, PromptCacheWriter, example_checkpoint
from kvstrata.engine.thread import EngineThread
from kvstrata.errors import ConfigError, InvalidRequest, Unavailable, UnusableFile
from kvstrata.kv.block_checks import check_description
from kvstrata.kv.checkpoints import Checkpoint
from kvstrata.kv.layout import Layout
from kvstrata.kv.mlx_prompt_files import TensorTable, looks_like_tensors, read_table
from kvstrata.kv.packing import block_bytes
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.jobs import Steps
from kvstrata.prefix_cache.keys import Identity, TokenIds, chain
from kvstrata.prefix_cache.prefetch import TierOffer
from kvstrata.prefix_cache.prefix_cache import PrefixCache as PrefixCache
from kvstrata.prefix_cache.tier_client import BlockLoad
from kvstrata.prefix_cache.transfer import ExportProgress, ImportProgress, ImportResult, neutral_root
from kvstrata.tiers.block import BASE, Block
from kvstrata.tiers.block_file import LARGEST_HEADER_BYTES
from kvstrata.tiers.bundle import (
    AGAIN,
    CHANGED,
    MAGIC,
    PIECE_BYTES,
    Bundle,
    BundleHeader,
    BundleWriter,
    Lineage,
    ModelNamed,
    Section,
    blocks_of,
    open_bundle,
    require_same_model,
)

# Longest waits of an export for a tier: for its answer, and for its blocks.
LOOKUP_S = 30.0

LOAD_S = 120.0

# An export ends when its client takes less than this, because the entries that it leases cannot be evicted meanwhile.
MIN_EXPORT_BYTES_S = 64 << 10

MIN_EXPORT_S = 120.0

T = TypeVar("T")

FileFormat = Literal["kvstrata", "mlx"]

TokenizePrompt = Callable[[Mapping[str, Any]], TokenIds]

Task = Callable[[EngineCore], Steps[T]]  # begins work that the engine thread does in small steps


@dataclass(frozen=True)
class ExportedConversation:
    """A conversation to export: its tokens and salt, the name of its session, and data that other modules add."""

    ids: TokenIds
    salt: str
    session: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)


@dataclass(frozen=True)
class ImportedConversation:
    """A conversation that was imported."""

    ids: TokenIds
    num_new: int  # tokens that were not cached before
    session: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifiedBundle:
    """The content of a bundle all of whose blocks were verified."""

    ids: TokenIds
    nbytes: int
    lineage: Lineage


class BundleTransfer:
    """Export and import of conversations. All methods block, so worker threads call them."""

    def __init__(self, thread: EngineThread, loaded: LoadedModel, max_cached_bytes: int) -> None:
        """`max_cached_bytes`: limit of the cached KV in memory."""
        self._thread = thread
        self._loaded = loaded
        self._max_cached_bytes = max_cached_bytes

    @property
    def limit_bytes(self) -> int:
        """Size of the largest file whose whole content fits the cache: blocks have headers beside their arrays."""
        return self._max_cached_bytes + self._max_cached_bytes // 2 + LARGEST_HEADER_BYTES

    # Export.

    def begin_export(self, conversation: ExportedConversation, file_format: FileFormat = "kvstrata") -> BundleExport:
        """Begin an export. Raises InvalidRequest where nothing of the conversation is cached."""
        self._require_sharing()
        self._load_from_tiers(conversation)
        export_class = BundleExport if file_format == "kvstrata" else PromptCacheExport
        export = export_class(self._thread, conversation, self._loaded.name)
        export.open()
        return export

    def _load_from_tiers(self, conversation: ExportedConversation) -> None:
        """Load into memory the tokens of the conversation that only a tier has."""
        ids, salt = conversation.ids, conversation.salt
        offers = self._thread.ask(lambda core: core.prefix_cache.prefetcher.ask(ids, salt)).result()
        if offers is None:
            return
        offers.wait(LOOKUP_S)
        for offer in offers.offers:
            self._load_from_tier(offer, conversation)

    def _load_from_tier(self, offer: TierOffer, conversation: ExportedConversation) -> None:
        ids, salt = conversation.ids, conversation.salt
        is_loaded = threading.Event()

        def begin_load(core: EngineCore) -> BlockLoad | None:
            load = core.prefix_cache.prefetcher.begin_load(offer, ids, salt)
            if load is not None:
                load.on_done = lambda _: is_loaded.set()
                if load.is_done:
                    is_loaded.set()
            return load

        load = self._thread.ask(begin_load).result()
        if load is not None:
            is_loaded.wait(LOAD_S)
            self._thread.ask(lambda core: core.prefix_cache.prefetcher.promote(load)).result()

    # Import.

    def import_file(
        self, file: BinaryIO, size_bytes: int, salt: str, tokenize_prompt: TokenizePrompt
    ) -> ImportedConversation:
        """Import an exported file, or a prompt cache of mlx-lm.

        Nothing is cached before the whole file was verified. Raises UnusableFile, NeverFits or MemoryPinned.
        """
        self._require_sharing()
        file.seek(0)
        first_bytes = file.read(len(MAGIC))
        if not first_bytes.startswith(MAGIC) and looks_like_tensors(first_bytes):
            return self._import_prompt_cache(read_table(file, 0, size_bytes), salt, lambda: None)
        bundle = open_bundle(file, size_bytes)
        if bundle.header.model is not None:
            return self._import_bundle(bundle, bundle.header.model, salt)
        if len(bundle.records) != 1:
            raise UnusableFile(f"The file does not hold one prompt cache. {AGAIN} {CHANGED}")
        (record,) = bundle.records
        prompt = bundle.header.prompt
        table = read_table(file, record.offset, record.nbytes)
        return self._import_prompt_cache(table, salt, lambda: tokenize_prompt(prompt) if prompt else None)

    def _import_prompt_cache(
        self, table: TensorTable, salt: str, given_ids: Callable[[], TokenIds | None]
    ) -> ImportedConversation:
        """Import a prompt cache of mlx-lm. `given_ids`: tokenizes the prompt that came beside it, if one did."""
        layout = self._thread.ask(lambda core: core.runner.layout).result()
        with _refusing_bad_files():
            reader = PromptCacheReader(table, layout)
            given = given_ids()
            ids = reader.recorded_ids if given is None else given
            if ids is None:
                raise UnusableFile(PROMPT_NEEDED, code="prompt_needed")
            self._require_known_ids(ids)
        cache, progress = self._thread.ask(
            lambda core: (core.prefix_cache, core.prefix_cache.imports.begin_import(ids, salt, table.nbytes))
        ).result()
        try:
            # The arrays are in memory before they are verified, so memory is reclaimed for them first.
            self._run_task(_on_cache(cache, lambda core: core.prefix_cache.imports.reclaim_memory(table.nbytes)))
            with _refusing_bad_files():
                span = reader.read_span(lambda task: self._run_task(_on_cache(cache, task)), ids)
            result = self._run_task(_on_cache(cache, lambda core: core.prefix_cache.imports.add_span(progress, span)))
            return ImportedConversation(ids, result.num_new)
        finally:
            self._end_import(cache, progress)

    def _import_bundle(self, bundle: Bundle, model: ModelNamed, salt: str) -> ImportedConversation:
        identity = self._thread.ask(lambda core: core.prefix_cache.matcher.identity).result()
        require_same_model(model, model_named(identity))
        verified = self._verify_bundle(bundle, identity)
        result = self._insert_blocks(bundle, verified, salt)
        return ImportedConversation(verified.ids, result.num_new, bundle.header.session, bundle.header.sections)

    def _verify_bundle(self, bundle: Bundle, identity: Identity) -> VerifiedBundle:
        example = self._run_task(example_checkpoint)
        layout = self._thread.ask(lambda core: core.runner.layout).result()
        max_bytes = block_bytes(layout) + LARGEST_HEADER_BYTES
        lineage = Lineage(neutral_root(identity), chain, max_bytes)
        runs: list[TokenIds] = []
        nbytes, last_checkpoint_at = 0, 0
        for block in blocks_of(bundle, lineage):
            self._verify_block(block, layout, example)
            nbytes += block.nbytes
            if block.part == BASE:
                runs.append(np.frombuffer(block.token_ids, "<i4").astype(np.int32))
            else:
                last_checkpoint_at = block.start + block.num_tokens
        ids = np.concatenate(runs)
        self._require_known_ids(ids)
        if example is not None and last_checkpoint_at != len(ids):
            raise UnusableFile(f"The file does not say how its last token left this model's layers. {AGAIN} {CHANGED}")
        return VerifiedBundle(ids, nbytes, lineage)

    def _verify_block(self, block: Block, layout: Layout, example: Checkpoint | None) -> None:
        with _refusing_bad_files():
            check_description(layout, block, example)
            self._run_task(lambda core: core.prefix_cache.imports.check_block(block, example))

    def _require_known_ids(self, ids: TokenIds) -> None:
        if not len(ids) or ids.min() < 0 or ids.max() >= self._loaded.vocab_size:
            raise UnusableFile(
                f"There are token ids that this model has not, or none; they go from 0 to "
                f"{self._loaded.vocab_size - 1}. {CHANGED}"
            )

    def _insert_blocks(self, bundle: Bundle, verified: VerifiedBundle, salt: str) -> ImportResult:

        def begin(core: EngineCore) -> tuple[PrefixCache, ImportProgress]:
            cache = core.prefix_cache
            return cache, cache.imports.begin_import(verified.ids, salt, verified.nbytes)

        cache, progress = self._thread.ask(begin).result()
        try:
            for block in blocks_of(bundle, verified.lineage):
                self._run_task(_on_cache(cache, partial(_add_block, progress, block)))
            return self._run_task(_on_cache(cache, lambda core: core.prefix_cache.imports.finish_import(progress)))
        finally:
            self._end_import(cache, progress)

    def _end_import(self, cache: PrefixCache, progress: ImportProgress) -> None:
        """Release the leases of an import, without waiting for it."""
        self._thread.ask(lambda core: core.prefix_cache is cache and cache.imports.end_import(progress))

    def _run_task(self, task: Task[T]) -> T:
        return _run_task(self._thread, task)

    def _require_sharing(self) -> None:
        if not self._thread.ask(lambda core: core.prefix_cache.can_share).result():
            raise InvalidRequest(
                "This model brings caches of its own kind, which cannot be shared: nothing is stored, and nothing can "
                "be exported or imported. GET /props shows its layers.",
                code="no_store",
            )


class BundleExport:
    """An export as a bundle. Leases cache entries from `open` until `close`; `close` must be called in any case."""

    def __init__(self, thread: EngineThread, conversation: ExportedConversation, model_name: str) -> None:
        self._thread = thread
        self._conversation = conversation
        self._model_name = model_name
        self._cache: PrefixCache
        self._progress: ExportProgress
        self._until_s = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self._progress.ids)

    def open(self) -> None:
        """Lease the conversation. Raises InvalidRequest where nothing of it is cached."""
        conversation = self._conversation

        def begin(core: EngineCore) -> Steps[tuple[PrefixCache, ExportProgress]]:
            progress = yield from core.prefix_cache.exports.begin_export(conversation.ids, conversation.salt)
            return core.prefix_cache, progress

        self._cache, self._progress = _run_task(self._thread, begin)
        self._until_s = time.monotonic() + MIN_EXPORT_S + self._progress.nbytes / MIN_EXPORT_BYTES_S

    def pieces(self) -> Iterator[memoryview]:
        """Yield the file's bytes; each piece is made when the client takes it."""
        conversation, progress = self._conversation, self._progress
        model = model_named(self._cache.matcher.identity)
        sections = dict(conversation.sections)
        writer = BundleWriter(BundleHeader("conversation", model, self.num_tokens, conversation.session, sections))
        yield from writer.begin()
        while not progress.is_done:
            for block in self._run_task(lambda core: core.prefix_cache.exports.next_blocks(progress)):
                yield from writer.block(block)
        yield from writer.end()

    def close(self) -> None:
        """Release the leases, without waiting for it."""
        cache, progress = self._cache, self._progress
        self._thread.ask(lambda core: core.prefix_cache is cache and cache.exports.end_export(progress))

    def _run_task(self, task: Task[T]) -> T:
        if time.monotonic() > self._until_s:
            raise Unavailable("The client takes the file too slowly.")
        return _run_task(self._thread, _on_cache(self._cache, task))


class PromptCacheExport(BundleExport):
    """An export as a prompt cache file that mlx-lm's own loader reads."""

    def pieces(self) -> Iterator[memoryview]:
        progress, name = self._progress, self._model_name

        def begin(core: EngineCore) -> Steps[PromptCacheWriter]:
            yield
            return PromptCacheWriter(core.runner.layout, progress, name)

        for piece in self._run_task(begin).pieces(self._run_task):
            yield from (piece[start : start + PIECE_BYTES] for start in range(0, piece.nbytes, PIECE_BYTES))


def model_named(identity: Identity) -> ModelNamed:
    """Return the description of a model that a bundle's header holds."""
    return ModelNamed(identity.fingerprint, identity.dtype, identity.layout, identity.max_kv_size)


def _run_task(thread: EngineThread, task: Task[T]) -> T:
    """Have the engine thread run a task in small steps between those of running requests, and wait for its result."""
    return thread.ask(lambda core: core.prefix_cache.tasks.add(task(core))).result().result()


def _add_block(progress: ImportProgress, block: Block, core: EngineCore) -> Steps[None]:
    return core.prefix_cache.imports.add_block(progress, block)


def _on_cache(cache: PrefixCache, task: Task[T]) -> Task[T]:
    """Return a task that refuses another cache than `cache`: a failed step replaces it, and its entries are gone."""

    def run(core: EngineCore) -> Steps[T]:
        if core.prefix_cache is not cache:
            raise Unavailable("The engine failed meanwhile. See the server's log, and try again.")
        return (yield from task(core))

    return run


@contextmanager
def _refusing_bad_files() -> Iterator[None]:
    """Turn any exception that a file's content causes into UnusableFile."""
    try:
        yield
    except ConfigError as error:
        raise UnusableFile(f"The file does not hold this model's KV: {error} {CHANGED}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise UnusableFile(f"The file makes no sense: {type(error).__name__}. {AGAIN} {CHANGED}") from error
