"""Conversations that leave for another machine, and those that come from one.

Called on worker threads, which wait: bytes are read, hashed and written there. What concerns arrays is done by the
engine's thread in small steps. Knows the file (`bundle/`) and the store; knows no HTTP and no keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, TypeVar

import numpy as np

from kvstrata.bundle.format import AGAIN, Header, ModelNamed, Section, require_same_model
from kvstrata.bundle.reading import CHANGED, Bundle, Lineage, blocks, open_bundle
from kvstrata.bundle.writing import BundleWriter
from kvstrata.disk.format import LARGEST_HEADER_BYTES
from kvstrata.engine.loop import Loop
from kvstrata.errors import ConfigError, InvalidRequest, Unavailable, UnusableFile
from kvstrata.index.identity import Identity
from kvstrata.index.ids import TokenIds
from kvstrata.index.keys import chain
from kvstrata.models.loaded import LoadedModel
from kvstrata.spans.blocks import block_bytes
from kvstrata.spans.marks import Mark, needs_marks, take_mark
from kvstrata.store.cold.loads import BlockLoad
from kvstrata.store.errands import Steps
from kvstrata.store.incoming import Arriving, Imported
from kvstrata.store.outgoing import Leaving, neutral_root
from kvstrata.store.stock import Stock
from kvstrata.tier.block import BASE, Block

# For what the disk has of a conversation, at most: to be asked, and to come.
LOOKUP_S = 30.0
LOAD_S = 600.0
# An export that a client takes more slowly than this ends: what it holds in memory cannot go meanwhile.
MIN_EXPORT_BYTES_S = 64 << 10
MIN_EXPORT_S = 120.0

T = TypeVar("T")


class Ask(Protocol):
    def __call__(self, question: Callable[[Loop], T], /) -> Future[T]: ...


class Errand(Protocol):
    def __call__(self, begin: Callable[[Loop], Steps[T]], /) -> Future[T]: ...


@dataclass(frozen=True)
class Conversation:
    """What is exported: tokens under a salt, the name of their session, and what others keep with it."""

    ids: TokenIds
    salt: str
    session: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)


@dataclass(frozen=True)
class TakenIn:
    """What an import brought. `num_new`: tokens that were not stored before."""

    ids: TokenIds
    num_new: int
    session: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)


class Moving:
    def __init__(self, ask: Ask, errand: Errand, loaded: LoadedModel) -> None:
        self._ask = ask
        self._errand = errand
        self._loaded = loaded

    # Out.

    def begin_export(self, conversation: Conversation) -> Exporting:
        """Raises InvalidRequest where nothing of it is stored."""
        self._require_store()
        self._fetch(conversation)
        exporting = Exporting(self._ask, self._errand, conversation)
        exporting.begin()
        return exporting

    def _fetch(self, conversation: Conversation) -> None:
        """What only the disk has comes to memory first."""
        ids, salt = conversation.ids, conversation.salt
        lookup = self._ask(lambda loop: loop.stock.fetches.look(ids, salt)).result()
        if lookup is None or not lookup.wait(LOOKUP_S):
            return
        come = threading.Event()

        def load(loop: Loop) -> BlockLoad | None:
            begun = loop.stock.fetches.load(lookup.answer, ids, salt)
            if begun is not None:
                begun.on_done = lambda _: come.set()
                if begun.is_done:
                    come.set()
            return begun

        loading = self._ask(load).result()
        if loading is not None:
            come.wait(LOAD_S)
            self._ask(lambda loop: loop.stock.fetches.promote(loading)).result()

    # In.

    def take_in(self, file: BinaryIO, size_bytes: int, salt: str) -> TakenIn:
        """A file that was exported. Nothing is changed before all of it was found good. Raises UnusableFile, NeverFits
        or MemoryPinned."""
        self._require_store()
        bundle = open_bundle(file, size_bytes)
        if bundle.header.model is None:
            raise UnusableFile(f"This file holds no conversation. {AGAIN} {CHANGED}")
        identity = self._identity()
        require_same_model(bundle.header.model, named(identity))
        checked = self._check(bundle, identity)
        imported = self._file(bundle, checked, salt)
        return TakenIn(checked.ids, imported.num_new, bundle.header.session, bundle.header.sections)

    def _check(self, bundle: Bundle, identity: Identity) -> Checked:
        like = self._errand(_any_mark).result()
        max_bytes = self._ask(lambda loop: block_bytes(loop.runner.layout)).result() + LARGEST_HEADER_BYTES
        lineage = Lineage(neutral_root(identity), chain, max_bytes)
        runs: list[TokenIds] = []
        nbytes, last_mark = 0, 0
        for block in blocks(bundle, lineage):
            self._check_block(block, like)
            nbytes += block.nbytes
            if block.part == BASE:
                runs.append(np.frombuffer(block.token_ids, "<i4").astype(np.int32))
            else:
                last_mark = block.start + block.num_tokens
        ids = np.concatenate(runs)
        if ids.min() < 0 or ids.max() >= self._loaded.vocab_size:
            raise UnusableFile(
                f"The file has token ids that this model has not; they go to {self._loaded.vocab_size - 1}. {CHANGED}"
            )
        if like is not None and last_mark != len(ids):
            raise UnusableFile(f"The file does not say how its last token left this model's layers. {AGAIN} {CHANGED}")
        return Checked(ids, nbytes, lineage)

    def _check_block(self, block: Block, like: Mark | None) -> None:
        try:
            self._errand(lambda loop: loop.stock.incoming.check(block, like)).result()
        except ConfigError as error:
            raise UnusableFile(f"The file does not hold this model's KV: {error} {CHANGED}") from error
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
            raise UnusableFile(
                f"A block of the file makes no sense: {type(error).__name__}. {AGAIN} {CHANGED}"
            ) from error

    def _file(self, bundle: Bundle, checked: Checked, salt: str) -> Imported:
        stock, arriving = self._ask(
            lambda loop: (loop.stock, loop.stock.incoming.begin(checked.ids, salt, checked.nbytes))
        ).result()
        try:
            for block in blocks(bundle, checked.lineage):
                self._errand(
                    _in_same(stock, lambda loop, block=block: loop.stock.incoming.add(arriving, block))
                ).result()
            return self._errand(_in_same(stock, lambda loop: loop.stock.incoming.finish(arriving))).result()
        finally:
            self._end(stock, arriving)

    def _end(self, stock: Stock, arriving: Arriving) -> None:
        self._ask(lambda loop: loop.stock is stock and stock.incoming.end(arriving))

    def _identity(self) -> Identity:
        return self._ask(lambda loop: loop.stock.search.identity).result()

    def _require_store(self) -> None:
        if not self._ask(lambda loop: loop.stock.store.can_share).result():
            raise InvalidRequest(
                "This model brings caches of its own kind, which cannot be shared: nothing is stored, and nothing can "
                "be exported or imported. GET /props shows its layers.",
                code="no_store",
            )


@dataclass(frozen=True)
class Checked:
    """A file that was found good."""

    ids: TokenIds
    nbytes: int
    lineage: Lineage


class Exporting:
    """One export. `end` must be called, whatever happens."""

    def __init__(self, ask: Ask, errand: Errand, conversation: Conversation) -> None:
        self._ask = ask
        self._errand = errand
        self._conversation = conversation
        self._stock: Stock
        self._leaving: Leaving
        self._until_s = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self._leaving.ids)

    def begin(self) -> None:
        conversation = self._conversation

        def begin(loop: Loop) -> Steps[tuple[Stock, Leaving]]:
            leaving = yield from loop.stock.outgoing.begin(conversation.ids, conversation.salt)
            return loop.stock, leaving

        self._stock, self._leaving = self._errand(begin).result()
        self._until_s = time.monotonic() + MIN_EXPORT_S + self._leaving.nbytes / MIN_EXPORT_BYTES_S

    def pieces(self) -> Iterator[memoryview]:
        """The file, made while it is taken."""
        conversation, leaving = self._conversation, self._leaving
        model = named(self._stock.search.identity)
        sections = dict(conversation.sections)
        writer = BundleWriter(Header("conversation", model, self.num_tokens, conversation.session, sections))
        yield from writer.begin()
        while not leaving.is_done:
            if time.monotonic() > self._until_s:
                raise Unavailable("The client takes the file too slowly.")
            for block in self._errand(
                _in_same(self._stock, lambda loop: loop.stock.outgoing.next_blocks(leaving))
            ).result():
                yield from writer.block(block)
        yield from writer.end()

    def end(self) -> None:
        """What was leased for it may go. Does not wait."""
        stock, leaving = self._stock, self._leaving
        self._ask(lambda loop: loop.stock is stock and stock.outgoing.end(leaving))


def named(identity: Identity) -> ModelNamed:
    return ModelNamed(identity.fingerprint, identity.dtype, identity.layout, identity.max_kv_size)


def _in_same(stock: Stock, begin: Callable[[Loop], Steps[T]]) -> Callable[[Loop], Steps[T]]:
    """Unless a step has failed since, and with it all that was in memory."""

    def checked(loop: Loop) -> Steps[T]:
        if loop.stock is not stock:
            raise Unavailable("The engine failed meanwhile. See the server's log, and try again.")
        return (yield from begin(loop))

    return checked


def _any_mark(loop: Loop) -> Generator[None, None, Mark | None]:
    """What a mark of this model looks like; None: it needs none."""
    yield
    if not needs_marks(loop.runner.layout):
        return None
    cache = loop.runner.new_cache(1)
    loop.runner.prefill(cache, [0])
    return take_mark(cache)
