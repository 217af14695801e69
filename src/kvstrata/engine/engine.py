"""The engine as other threads see it: submit and cancel requests, and receive events through each request's sink.

One thread owns MLX and runs the engine core. The engine posts commands to that thread.
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

from kvstrata.codecs.backends import runtime
from kvstrata.engine.build import identity_of
from kvstrata.engine.bundle_transfer import BundleTransfer
from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import EngineLimits, KvConfig, TierConfig, half_of_places
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import EngineState, Event, Failed, Finished, Request, Sink
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.thread import EndRequest, EngineThread, Submit
from kvstrata.errors import ContextTooLong, InvalidRequest, QueueFull, RequestError, Unavailable
from kvstrata.kv.checkpoints import needs_checkpoints
from kvstrata.kv.decode_step import explain
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.prefix_cache.keys import Identity, owner_of
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.options import DiskOptions, RemoteOptions

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Requests of all clients on one model. Every method may be called from any thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        limits: EngineLimits,
        metrics: Metrics,
        kv_config: KvConfig | None = None,
        disk: DiskOptions | None = None,
        files: Filesystem | None = None,
        *,
        remote: RemoteOptions | None = None,
        watcher: CacheListener | None = None,
    ) -> None:
        """`disk`, `files`, `remote` and `watcher` are the fields of `TierConfig`."""
        self._limits = limits
        self._metrics = metrics
        self._thread = EngineThread(
            loaded, limits, metrics, kv_config or KvConfig(), TierConfig(disk, files, remote, watcher)
        )
        self._lock = threading.Lock()  # guards _open, _num_open and _accepting
        self._open: dict[str, str] = {}  # owner of each request that has not ended, by request id
        self._num_open: Counter[str] = Counter()  # open requests of each owner
        self._accepting = False
        self._sequence_ids = itertools.count()

    def start(self) -> None:
        """Start the engine's thread, and wait until it can serve. Raises the error that prevents it."""
        self._thread.start()
        with self._lock:
            self._accepting = True

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. The engine's thread calls `sink` with every event. Raises RequestError for a refusal."""
        with self._counting_refusals():
            self._enqueue(request, sink)
        self._metrics.prompt_tokens.inc(len(request.prompt))

    def require_place(self, owner: str = "") -> None:
        """Raise what `submit` would raise now for any request of this owner.

        For callers with work to do before they submit.
        """
        with self._counting_refusals(), self._lock:
            self._require_place(owner)

    def cancel(self, request_id: str) -> None:
        """End a request whose client has left."""
        self._thread.post(EndRequest(request_id, "cancelled"))

    def finish_early(self, request_id: str) -> None:
        """End a request whose reply is complete although the model would go on."""
        self._thread.post(EndRequest(request_id, "stop"))

    def drain(self) -> None:
        """Refuse new requests. Waiting and running requests go on."""
        with self._lock:
            self._accepting = False

    def idle(self) -> bool:
        """Whether every request has ended."""
        with self._lock:
            return not self._open

    @property
    def alive(self) -> bool:
        return self._thread.alive

    def stop(self) -> None:
        """Fail all requests, write the cache to its tiers, and end the engine's thread."""
        self.drain()
        self._thread.stop()

    def state(self) -> EngineState:
        """Return the state as of the last step."""
        return self._thread.state

    @property
    def context_tokens(self) -> int:
        return self._thread.served.context_tokens

    @property
    def identity(self) -> Identity:
        """Identity of the model, by which cached blocks are named."""
        return identity_of(self._thread.served)

    @property
    def resumes_at_checkpoints(self) -> bool:
        """Whether the model resumes only at checkpoints, so that `Request.resume_at` matters."""
        return needs_checkpoints(self._thread.served.layout)

    def props(self) -> dict[str, Any]:
        """Return the engine's part of GET /props."""
        served = self._thread.served
        layout, budget, kv_config = served.layout, served.budget, served.kv_config
        return {
            "layers": layout.count_by_kind(),
            "attention": {
                "path": layout.batching,
                "why": layout.reason,
                "kernels": [dataclasses.asdict(choice) for choice in explain(layout)],
                "backend": runtime().backend,
            },
            "key_means": layout.describe_rope(),
            "max_kv_size": self._limits.max_kv_size,
            "kv": {"k": kv_config.k.name, "v": kv_config.v.name, "dtype": served.loaded.dtype},
            "kv_bytes_per_token": budget.token_bytes,
            "kv_bytes_per_sequence": budget.fixed_bytes,
            "kv_budget_bytes": budget.total_bytes,
            "memory": dataclasses.asdict(served.memory_plan),
            "context_tokens": self.context_tokens,
            "max_running": self._limits.max_running,
            "max_waiting": self._limits.max_waiting,
        }

    @property
    def transfer(self) -> BundleTransfer:
        return BundleTransfer(self._thread, self._thread.served.loaded, self._thread.core.prefix_cache.table.max_bytes)

    def ask(self, question: Callable[[EngineCore], T]) -> Future[T]:
        """Have the engine thread call a function with the engine core between two steps."""
        return self._thread.ask(question)

    def ask_cache(self, question: Callable[[CacheApi], T]) -> Future[T]:
        """Have the engine thread answer a question about the cache between two steps."""
        return self._thread.ask(lambda core: question(CacheApi(core)))

    def _enqueue(self, request: Request, sink: Sink) -> None:
        max_tokens, owner = self._check(request), owner_of(request.salt)
        with self._lock:
            if request.id in self._open:
                raise InvalidRequest(f"A request with the id {request.id!r} is running already.")
            self._require_place(owner)
            sequence = Sequence(request, self._closing(request.id, sink), max_tokens, next(self._sequence_ids))
            # Posted under the lock: the request is open before its first event can close it.
            if not self._thread.post(Submit(sequence)):
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
        """Return a sink that frees the request's id before it passes the last event on.

        The client may submit its next request as soon as it receives that event.
        """

        def emit(event: Event) -> None:
            if isinstance(event, Finished | Failed):
                with self._lock:
                    self._close(request_id)
            try:
                sink(event)
            except Exception:
                # A fault in the sink of one client must not fail the requests of others.
                log.exception("the sink of %s failed", request_id)

        return emit

    def _close(self, request_id: str) -> None:
        owner = self._open.pop(request_id, None)
        if owner is not None:
            self._num_open[owner] -= 1
            if not self._num_open[owner]:
                del self._num_open[owner]

    def _check(self, request: Request) -> int:
        """Refuse a request that can never be served. Return the most tokens of its reply."""
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
        budget = self._thread.core.budget
        return budget.reply_tokens(len(request.prompt), request.max_tokens, may_be_less=request.open_ended)
