"""Export and import of conversations as files, on worker threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

import numpy as np

from kvstrata.bundle.format import AGAIN, MAGIC, Header, ModelNamed, Section, require_same_model
from kvstrata.bundle.reading import CHANGED, Bundle, Lineage, blocks, open_bundle
from kvstrata.bundle.tensors import TensorTable, looks_like_tensors, read_table
from kvstrata.bundle.writing import PIECE_BYTES, BundleWriter
from kvstrata.disk.format import LARGEST_HEADER_BYTES
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.prompt_cache_file import WITHOUT_PROMPT, PromptFileIn, PromptFileOut, any_mark
from kvstrata.errors import ConfigError, InvalidRequest, Unavailable, UnusableFile
from kvstrata.layers.kinds import Layout
from kvstrata.models.loaded import LoadedModel
from kvstrata.prefix_cache.jobs import Steps
from kvstrata.prefix_cache.keys import Identity, TokenIds, chain
from kvstrata.prefix_cache.prefetch import TierOffer
from kvstrata.prefix_cache.prefix_cache import Stock
from kvstrata.prefix_cache.tier_client import BlockLoad
from kvstrata.prefix_cache.transfer import ConversationArrival, ConversationDeparture, Imported, neutral_root
from kvstrata.spans.blocks import block_bytes
from kvstrata.spans.checks import check_description
from kvstrata.spans.marks import Mark
from kvstrata.tier.block import BASE, Block

# For what the disk has of a conversation, at most: to be asked, and to come.
LOOKUP_S = 30.0

LOAD_S = 120.0

# An export that a client takes more slowly than this ends: what it holds in memory cannot go meanwhile.
MIN_EXPORT_BYTES_S = 64 << 10

MIN_EXPORT_S = 120.0

T = TypeVar("T")

Form = Literal["kvstrata", "mlx"]

IdsOf = Callable[[Mapping[str, Any]], TokenIds]


class Ask(Protocol):
    def __call__(self, question: Callable[[EngineCore], T], /) -> Future[T]: ...


def _done(ask: Ask, begin: Callable[[EngineCore], Steps[T]]) -> T:
    """Have the engine's thread do something in small steps, between those of the requests that run, and wait for it."""
    return ask(lambda loop: loop.stock.tasks.add(begin(loop))).result().result()


@dataclass(frozen=True)
class ExportedConversation:
    """What is exported: tokens under a salt, the name of their session, and what others keep with it."""

    ids: TokenIds
    salt: str
    session: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)


@dataclass(frozen=True)
class ImportedConversation:
    """What an import brought. `num_new`: tokens that were not stored before."""

    ids: TokenIds
    num_new: int
    session: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)


class BundleTransfer:
    """`stored_bytes`: most that memory may hold of stored KV."""

    def __init__(self, ask: Ask, loaded: LoadedModel, stored_bytes: int) -> None:
        self._ask = ask
        self._loaded = loaded
        self._stored_bytes = stored_bytes

    @property
    def limit_bytes(self) -> int:
        """Most that a file can have of which all could be stored: its blocks have headers beside their arrays."""
        return self._stored_bytes + self._stored_bytes // 2 + LARGEST_HEADER_BYTES

    # Out.

    def begin_export(self, conversation: ExportedConversation, form: Form = "kvstrata") -> BundleExport:
        """`form`: of the file. Raises InvalidRequest where nothing of it is stored."""
        self._require_store()
        self._fetch(conversation)
        make = BundleExport if form == "kvstrata" else PromptCacheExport
        exporting = make(self._ask, conversation, self._loaded.name)
        exporting.begin()
        return exporting

    def _fetch(self, conversation: ExportedConversation) -> None:
        """What only the tiers have comes to memory first."""
        ids, salt = conversation.ids, conversation.salt
        asked = self._ask(lambda loop: loop.stock.prefetcher.ask(ids, salt)).result()
        if asked is None:
            return
        asked.wait(LOOKUP_S)
        for offer in asked.offers:
            self._load(offer, conversation)

    def _load(self, offer: TierOffer, conversation: ExportedConversation) -> None:
        """What one tier has more than memory."""
        ids, salt = conversation.ids, conversation.salt
        come = threading.Event()

        def load(loop: EngineCore) -> BlockLoad | None:
            begun = loop.stock.prefetcher.begin_load(offer, ids, salt)
            if begun is not None:
                begun.on_done = lambda _: come.set()
                if begun.is_done:
                    come.set()
            return begun

        loading = self._ask(load).result()
        if loading is not None:
            come.wait(LOAD_S)
            self._ask(lambda loop: loop.stock.prefetcher.promote(loading)).result()

    # In.

    def import_file(self, file: BinaryIO, size_bytes: int, salt: str, ids_of: IdsOf) -> ImportedConversation:
        """A file that was exported, or a prompt cache of mlx-lm. Nothing is stored before all of it was found good.
        `ids_of`: makes token ids of a prompt. Raises UnusableFile, NeverFits or MemoryPinned."""
        self._require_store()
        file.seek(0)
        beginning = file.read(len(MAGIC))
        if not beginning.startswith(MAGIC) and looks_like_tensors(beginning):
            return self._take_prompt_cache(read_table(file, 0, size_bytes), salt, lambda: None)
        bundle = open_bundle(file, size_bytes)
        if bundle.header.model is not None:
            return self._take_conversation(bundle, bundle.header.model, salt)
        if len(bundle.records) != 1:
            raise UnusableFile(f"The file does not hold one prompt cache. {AGAIN} {CHANGED}")
        (record,) = bundle.records
        prompt = bundle.header.prompt
        table = read_table(file, record.offset, record.nbytes)
        return self._take_prompt_cache(table, salt, lambda: ids_of(prompt) if prompt else None)

    def _take_prompt_cache(
        self, table: TensorTable, salt: str, own_prompt: Callable[[], TokenIds | None]
    ) -> ImportedConversation:
        layout = self._ask(lambda loop: loop.runner.layout).result()
        with _refusing():
            incoming = PromptFileIn(table, layout)
            given = own_prompt()
            ids = incoming.own_ids if given is None else given
            if ids is None:
                raise UnusableFile(WITHOUT_PROMPT, code="prompt_needed")
            self._require_known(ids)
        stock, arriving = self._ask(
            lambda loop: (loop.stock, loop.stock.incoming.begin(ids, salt, table.nbytes))
        ).result()
        try:
            # It is in memory before it is known to be good: what that takes must be free.
            self._wait(_in_same(stock, lambda loop: loop.stock.incoming.making_room(table.nbytes)))
            with _refusing():
                span = incoming.span(lambda begin: self._wait(_in_same(stock, begin)), ids)
            imported = self._wait(_in_same(stock, lambda loop: loop.stock.incoming.add_span(arriving, span)))
            return ImportedConversation(ids, imported.num_new)
        finally:
            self._end(stock, arriving)

    def _wait(self, begin: Callable[[EngineCore], Steps[T]]) -> T:
        return _done(self._ask, begin)

    def _take_conversation(self, bundle: Bundle, model: ModelNamed, salt: str) -> ImportedConversation:
        identity = self._identity()
        require_same_model(model, named(identity))
        checked = self._check(bundle, identity)
        imported = self._file(bundle, checked, salt)
        return ImportedConversation(checked.ids, imported.num_new, bundle.header.session, bundle.header.sections)

    def _check(self, bundle: Bundle, identity: Identity) -> VerifiedBundle:
        like = self._wait(any_mark)
        layout = self._ask(lambda loop: loop.runner.layout).result()
        max_bytes = block_bytes(layout) + LARGEST_HEADER_BYTES
        lineage = Lineage(neutral_root(identity), chain, max_bytes)
        runs: list[TokenIds] = []
        nbytes, last_mark = 0, 0
        for block in blocks(bundle, lineage):
            self._check_block(block, layout, like)
            nbytes += block.nbytes
            if block.part == BASE:
                runs.append(np.frombuffer(block.token_ids, "<i4").astype(np.int32))
            else:
                last_mark = block.start + block.num_tokens
        ids = np.concatenate(runs)
        self._require_known(ids)
        if like is not None and last_mark != len(ids):
            raise UnusableFile(f"The file does not say how its last token left this model's layers. {AGAIN} {CHANGED}")
        return VerifiedBundle(ids, nbytes, lineage)

    def _check_block(self, block: Block, layout: Layout, like: Mark | None) -> None:
        with _refusing():
            check_description(layout, block, like)
            self._wait(lambda loop: loop.stock.incoming.check(block, like))

    def _require_known(self, ids: TokenIds) -> None:
        if not len(ids) or ids.min() < 0 or ids.max() >= self._loaded.vocab_size:
            raise UnusableFile(
                f"There are token ids that this model has not, or none; they go from 0 to "
                f"{self._loaded.vocab_size - 1}. {CHANGED}"
            )

    def _file(self, bundle: Bundle, checked: VerifiedBundle, salt: str) -> Imported:
        stock, arriving = self._ask(
            lambda loop: (loop.stock, loop.stock.incoming.begin(checked.ids, salt, checked.nbytes))
        ).result()
        try:
            for block in blocks(bundle, checked.lineage):
                self._wait(_in_same(stock, lambda loop, block=block: loop.stock.incoming.add(arriving, block)))
            return self._wait(_in_same(stock, lambda loop: loop.stock.incoming.finish(arriving)))
        finally:
            self._end(stock, arriving)

    def _end(self, stock: Stock, arriving: ConversationArrival) -> None:
        self._ask(lambda loop: loop.stock is stock and stock.incoming.end(arriving))

    def _identity(self) -> Identity:
        return self._ask(lambda loop: loop.stock.matcher.identity).result()

    def _require_store(self) -> None:
        if not self._ask(lambda loop: loop.stock.store.can_share).result():
            raise InvalidRequest(
                "This model brings caches of its own kind, which cannot be shared: nothing is stored, and nothing can "
                "be exported or imported. GET /props shows its layers.",
                code="no_store",
            )


@dataclass(frozen=True)
class VerifiedBundle:
    """A file that was found good."""

    ids: TokenIds
    nbytes: int
    lineage: Lineage


class BundleExport:
    """One export. `end` must be called, whatever happens."""

    def __init__(self, ask: Ask, conversation: ExportedConversation, model_name: str) -> None:
        self._ask = ask
        self._conversation = conversation
        self._model_name = model_name
        self._stock: Stock
        self._leaving: ConversationDeparture
        self._until_s = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self._leaving.ids)

    def begin(self) -> None:
        conversation = self._conversation

        def begin(loop: EngineCore) -> Steps[tuple[Stock, ConversationDeparture]]:
            leaving = yield from loop.stock.outgoing.begin(conversation.ids, conversation.salt)
            return loop.stock, leaving

        self._stock, self._leaving = _done(self._ask, begin)
        self._until_s = time.monotonic() + MIN_EXPORT_S + self._leaving.nbytes / MIN_EXPORT_BYTES_S

    def pieces(self) -> Iterator[memoryview]:
        """The file, made while it is taken."""
        conversation, leaving = self._conversation, self._leaving
        model = named(self._stock.matcher.identity)
        sections = dict(conversation.sections)
        writer = BundleWriter(Header("conversation", model, self.num_tokens, conversation.session, sections))
        yield from writer.begin()
        while not leaving.is_done:
            for block in self._wait(lambda loop: loop.stock.outgoing.next_blocks(leaving)):
                yield from writer.block(block)
        yield from writer.end()

    def _wait(self, begin: Callable[[EngineCore], Steps[T]]) -> T:
        if time.monotonic() > self._until_s:
            raise Unavailable("The client takes the file too slowly.")
        return _done(self._ask, _in_same(self._stock, begin))

    def end(self) -> None:
        """What was leased for it may go. Does not wait."""
        stock, leaving = self._stock, self._leaving
        self._ask(lambda loop: loop.stock is stock and stock.outgoing.end(leaving))


class PromptCacheExport(BundleExport):
    """As a file that mlx-lm's own loader takes."""

    def pieces(self) -> Iterator[memoryview]:
        leaving, name = self._leaving, self._model_name

        def begin(loop: EngineCore) -> Steps[PromptFileOut]:
            yield
            return PromptFileOut(loop.runner.layout, leaving, name)

        for piece in self._wait(begin).pieces(self._wait):
            yield from (piece[start : start + PIECE_BYTES] for start in range(0, piece.nbytes, PIECE_BYTES))


def named(identity: Identity) -> ModelNamed:
    return ModelNamed(identity.fingerprint, identity.dtype, identity.layout, identity.max_kv_size)


def _in_same(stock: Stock, begin: Callable[[EngineCore], Steps[T]]) -> Callable[[EngineCore], Steps[T]]:
    """Unless a step has failed since, and with it all that was in memory."""

    def checked(loop: EngineCore) -> Steps[T]:
        if loop.stock is not stock:
            raise Unavailable("The engine failed meanwhile. See the server's log, and try again.")
        return (yield from begin(loop))

    return checked


@contextmanager
def _refusing() -> Iterator[None]:
    """What is wrong with a file is told, whatever it is."""
    try:
        yield
    except ConfigError as error:
        raise UnusableFile(f"The file does not hold this model's KV: {error} {CHANGED}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise UnusableFile(f"The file makes no sense: {type(error).__name__}. {AGAIN} {CHANGED}") from error
