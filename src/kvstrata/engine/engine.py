"""The engine as other threads see it: hand in requests and cancellations, get events back through each request's sink.

One thread owns MLX and runs the loop; what crosses to it goes through a queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstrata.attention import attend
from kvstrata.codecs import paths
from kvstrata.disk.files import Files
from kvstrata.disk.options import DiskOptions
from kvstrata.engine.build import identity_of
from kvstrata.engine.bundle_transfer import BundleTransfer
from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import EngineLimits, KvConfig, TierConfig, half_of_places
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import EngineState, Event, Failed, Finished, Request, Sink
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.thread import EngineThread
from kvstrata.errors import ContextTooLong, InvalidRequest, QueueFull, RequestError, Unavailable
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.prefix_cache.keys import Identity, owner_of
from kvstrata.remote.options import RemoteOptions
from kvstrata.spans.marks import needs_marks

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    def __init__(
        self,
        loaded: LoadedModel,
        limits: EngineLimits,
        metrics: Metrics,
        storage: KvConfig | None = None,
        disk: DiskOptions | None = None,
        files: Files | None = None,
        *,
        remote: RemoteOptions | None = None,
        watcher: CacheListener | None = None,
    ) -> None:
        """Of `disk` to `watcher`: see `Outside`."""
        self._limits = limits
        self._metrics = metrics
        self._thread = EngineThread(
            loaded, limits, metrics, storage or KvConfig(), TierConfig(disk, files, remote, watcher)
        )
        self._lock = threading.Lock()  # guards the next three
        self._open: dict[str, str] = {}  # submitted and not ended: id to owner
        self._num_open: Counter[str] = Counter()  # of each owner
        self._accepting = False
        self._arrivals = itertools.count()

    def start(self) -> None:
        """Blocks until the model was probed; raises what went wrong."""
        self._thread.start()
        with self._lock:
            self._accepting = True

    def submit(self, request: Request, sink: Sink) -> None:
        with self._counting_refusals():
            self._enqueue(request, sink)
        self._metrics.prompt_tokens.inc(len(request.prompt))

    def require_place(self, owner: str = "") -> None:
        """Raises what `submit` would raise now for any request of this owner: for callers who have work to do before
        they submit."""
        with self._counting_refusals(), self._lock:
            self._require_place(owner)

    def cancel(self, request_id: str) -> None:
        self._thread.post(lambda: self._thread.loop.executor.end_request(request_id, "cancelled"))

    def finish_early(self, request_id: str) -> None:
        """The reply is complete as it is, though the model would go on."""
        self._thread.post(lambda: self._thread.loop.executor.end_request(request_id, "stop"))

    def drain(self) -> None:
        """Take no new requests; those that wait or run go on."""
        with self._lock:
            self._accepting = False

    def idle(self) -> bool:
        with self._lock:
            return not self._open

    @property
    def alive(self) -> bool:
        return self._thread.alive

    def stop(self) -> None:
        self.drain()
        self._thread.stop()

    def state(self) -> EngineState:
        return self._thread.state

    @property
    def context_tokens(self) -> int:
        return self._thread.context_tokens

    @property
    def identity(self) -> Identity:
        """By which it names what it stores."""
        return identity_of(self._thread.served)

    @property
    def resumes_at_checkpoints(self) -> bool:
        """Whether it matters to know where later requests will part from a prompt."""
        return needs_marks(self._thread.served.layout)

    def props(self) -> dict[str, Any]:
        served = self._thread.served
        layout, budget, storage = served.layout, served.budget, served.storage
        return {
            "layers": layout.count_by_kind(),
            "attention": {
                "path": layout.path,
                "why": layout.reason,
                "kernels": attend.kernels(layout.head_kinds()),
                "quantized": paths.active(),
            },
            "key_means": layout.turning(),
            "max_kv_size": self._limits.max_kv_size,
            "kv": {"k": storage.k.name, "v": storage.v.name, "dtype": served.loaded.dtype},
            "kv_bytes_per_token": budget.token_bytes,
            "kv_bytes_per_sequence": budget.fixed_bytes,
            "kv_budget_bytes": budget.total_bytes,
            "memory": dataclasses.asdict(self._thread.shares),
            "context_tokens": self.context_tokens,
            "max_running": self._limits.max_running,
            "max_waiting": self._limits.max_waiting,
        }

    @property
    def transfer(self) -> BundleTransfer:
        return BundleTransfer(self._thread, self._thread.served.loaded, self._thread.loop.stock.table.max_bytes)

    def ask(self, question: Callable[[EngineCore], T]) -> Future[T]:
        """Have the engine's thread answer something between two steps."""
        return self._thread.ask(question)

    def ask_cache(self, question: Callable[[CacheApi], T]) -> Future[T]:
        """Have the engine's thread answer a question about the cache between two steps."""
        return self._thread.ask(lambda loop: question(CacheApi(loop)))

    def _enqueue(self, request: Request, sink: Sink) -> None:
        max_tokens, owner = self._check(request), owner_of(request.salt)
        with self._lock:
            if request.id in self._open:
                raise InvalidRequest(f"A request with the id {request.id!r} is running already.")
            self._require_place(owner)
            sequence = Sequence(request, self._closing(request.id, sink), max_tokens, next(self._arrivals))
            # Under the lock: a stop that comes now finds it.
            if not self._thread.post(lambda: self._thread.loop.executor.enqueue_sequence(sequence)):
                raise Unavailable("The engine has stopped. Restart the server; its log says why.")
            self._open[request.id] = owner
            self._num_open[owner] += 1

    def _require_place(self, owner: str) -> None:
        if not self._accepting:
            raise Unavailable("The server is shutting down and takes no new requests.")
        num_own, num_places = self._num_open[owner], self._limits.num_places
        if len(self._open) >= num_places:
            raise QueueFull(f"{len(self._open)} requests are running or waiting already. Try again in a moment.")
        if self._limits.shares_queue and num_own >= half_of_places(num_places - (len(self._open) - num_own)):
            raise QueueFull(
                f"{num_own} requests of this key are running or waiting already, and the other places are kept for "
                "other keys. Try again when some have ended."
            )

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            self._metrics.refused.labels(reason=error.code or "invalid").inc()
            raise

    def _closing(self, request_id: str, sink: Sink) -> Sink:
        """The request's sink. We see its last event first: the client that gets it may submit the next at once."""

        def emit(event: Event) -> None:
            if isinstance(event, Finished | Failed):
                with self._lock:
                    self._close(request_id)
            try:
                sink(event)
            except Exception:
                # One client's sink must not cost the others their replies.
                log.exception("the sink of %s failed", request_id)

        return emit

    def _close(self, request_id: str) -> None:
        owner = self._open.pop(request_id, None)
        if owner is not None:
            self._num_open[owner] -= 1
            if not self._num_open[owner]:
                del self._num_open[owner]

    def _check(self, request: Request) -> int:
        """Refuse what can never be served; tell how long the reply may get."""
        if not request.prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        if request.grammar is not None and request.grammar.vocab_size != self._thread.served.loaded.vocab_size:
            raise ValueError("The grammar was compiled for another model.")
        needed = len(request.prompt) + request.max_tokens
        if needed > self.context_tokens:
            raise ContextTooLong(
                f"This model's context is {self.context_tokens} tokens. The request needs {needed}: "
                f"{len(request.prompt)} in the prompt and {request.max_tokens} for the reply. "
                "Shorten the prompt or lower max_tokens."
            )
        budget = self._thread.loop.budget
        return budget.reply_tokens(len(request.prompt), request.max_tokens, may_be_less=request.open_ended)
