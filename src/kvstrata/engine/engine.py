"""The engine as other threads see it: hand in requests and cancellations, get events back through each request's sink.

One thread owns MLX and runs the loop; what crosses to it goes through a queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import mlx.core as mx

from kvstrata.attention import attend, cpu
from kvstrata.backend import device
from kvstrata.backend.allocator import limits_restored
from kvstrata.backend.heap import map_large_buffers, trim_heap
from kvstrata.backend.streams import streams
from kvstrata.codecs import paths
from kvstrata.disk.files import Files
from kvstrata.disk.options import DiskOptions
from kvstrata.disk.tier import DiskTier
from kvstrata.engine.cache import Cache
from kvstrata.engine.limits import EngineState, Limits, Storage
from kvstrata.engine.loop import Loop
from kvstrata.engine.memory import DEFAULT_SHARE, Budget, MemoryShares, make_budget, share_memory
from kvstrata.engine.planned import least_token_bytes, sealed_pairs
from kvstrata.engine.remembered import remembered_scratch
from kvstrata.engine.request import Event, Failed, Finished, Request, Sink
from kvstrata.engine.resume import make_resume
from kvstrata.engine.runner import Runner
from kvstrata.engine.scratch import Shape, max_chunk, measure_prefill
from kvstrata.engine.sequence import Sequence
from kvstrata.errors import ContextTooLong, InvalidRequest, QueueFull, RequestError, Unavailable
from kvstrata.index.keys import chain
from kvstrata.layers.kinds import Layout
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.models.probe import probe
from kvstrata.spans.contents import tally
from kvstrata.spans.marks import needs_marks
from kvstrata.store.cold.cold import Cold, no_cold
from kvstrata.text.detokenizer import Detokenizer
from kvstrata.text.special import special_tokens

log = logging.getLogger(__name__)

T = TypeVar("T")

# Ids before a plain completion that the first word of its text may depend on.
CONTEXT_IDS = 8
# Work on stored KV while no sequence runs, until the inbox is looked at again.
IDLE_SLICE_S = 0.05
# Of the memory for KV, one part in so many: most that is read from the disk ahead of its use.
READ_AHEAD_SHARE = 8


class Engine:
    def __init__(
        self,
        loaded: LoadedModel,
        limits: Limits,
        metrics: Metrics,
        storage: Storage | None = None,
        disk: DiskOptions | None = None,
        files: Files | None = None,
    ) -> None:
        """`files`: how the disk's files are read and written; None: as the system does."""
        self._loaded = loaded
        self._disk = disk  # None: what memory has no room for is gone
        self._files = files
        self._limits = limits
        self._storage = storage or Storage()
        self._metrics = metrics
        self._special = special_tokens(loaded.tokenizer)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="kvstrata-engine", daemon=True)
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._lock = threading.Lock()  # guards the next two
        self._open: set[str] = set()  # submitted and not ended
        self._accepting = False
        self._stopped = False
        self._arrivals = itertools.count()
        self._stopping = False
        self._state = EngineState()
        # Made by the engine's thread before start() returns.
        self._layout: Layout
        self._cold: Cold
        self._shares: MemoryShares
        self._budget: Budget
        self._prefill_tokens_s: float
        self._loop: Loop

    def start(self) -> None:
        """Blocks until the model was probed; raises what went wrong."""
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error
        with self._lock:
            self._accepting = True

    def submit(self, request: Request, sink: Sink) -> None:
        with self._counting_refusals():
            self._enqueue(request, sink)
        self._metrics.prompt_tokens.inc(len(request.prompt))

    def require_room(self) -> None:
        """Raises what `submit` would raise now for any request: for callers who have work to do before they submit."""
        with self._counting_refusals(), self._lock:
            self._require_place()

    def cancel(self, request_id: str) -> None:
        self._inbox.put(lambda: self._loop.cancel(request_id))

    def drain(self) -> None:
        """Take no new requests; those that wait or run go on."""
        with self._lock:
            self._accepting = False

    def idle(self) -> bool:
        with self._lock:
            return not self._open

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self.drain()
        self._inbox.put(self._end)
        self._thread.join()

    def state(self) -> EngineState:
        return self._state

    @property
    def context_tokens(self) -> int:
        return min(self._limits.context_tokens or self._loaded.context_tokens, self._loaded.context_tokens)

    @property
    def resumes_at_marks(self) -> bool:
        """Whether it matters to know where later requests will part from a prompt."""
        return needs_marks(self._layout)

    def props(self) -> dict[str, Any]:
        return {
            "layers": self._layout.count_by_kind(),
            "attention": {
                "path": self._layout.path,
                "why": self._layout.reason,
                "kernels": attend.kernels(self._layout.head_kinds()),
                "quantized": paths.active(),
            },
            "key_means": self._layout.turning(),
            "max_kv_size": self._limits.max_kv_size,
            "kv": {"k": self._storage.k, "v": self._storage.v, "dtype": self._loaded.dtype},
            "kv_bytes_per_token": self._budget.token_bytes,
            "kv_bytes_per_sequence": self._budget.fixed_bytes,
            "kv_budget_bytes": self._budget.total_bytes,
            "memory": dataclasses.asdict(self._shares),
            "context_tokens": self.context_tokens,
            "max_running": self._limits.max_running,
            "max_waiting": self._limits.max_waiting,
        }

    @property
    def cache(self) -> Cache:
        return Cache(self.ask)

    def ask(self, question: Callable[[Loop], T]) -> Future[T]:
        """Have the engine's thread answer something between two steps."""
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(self._loop))
            except Exception as error:  # noqa: BLE001
                # The caller gets it.
                answer.set_exception(error)

        with self._lock:
            if self._stopped:
                answer.set_exception(Unavailable("The engine has stopped."))
            else:
                self._inbox.put(run)
        return answer

    def _enqueue(self, request: Request, sink: Sink) -> None:
        max_tokens = self._check(request)
        with self._lock:
            if request.id in self._open:
                raise InvalidRequest(f"A request with the id {request.id!r} is running already.")
            self._require_place()
            self._open.add(request.id)
            sequence = Sequence(request, self._closing(request.id, sink), max_tokens, next(self._arrivals))
            # Under the lock: a stop that comes now finds it.
            self._inbox.put(lambda: self._loop.enqueue(sequence))

    def _require_place(self) -> None:
        if not self._accepting:
            raise Unavailable("The server is shutting down and takes no new requests.")
        if len(self._open) >= self._limits.max_running + self._limits.max_waiting:
            raise QueueFull(f"{len(self._open)} requests are running or waiting already. Try again in a moment.")

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
                    self._open.discard(request_id)
            try:
                sink(event)
            except Exception:
                # One client's sink must not cost the others their replies.
                log.exception("the sink of %s failed", request_id)

        return emit

    def _check(self, request: Request) -> int:
        """Refuse what can never be served; tell how long the reply may get."""
        if not request.prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        needed = len(request.prompt) + request.max_tokens
        if needed > self.context_tokens:
            raise ContextTooLong(
                f"This model's context is {self.context_tokens} tokens. The request needs {needed}: "
                f"{len(request.prompt)} in the prompt and {request.max_tokens} for the reply. "
                "Shorten the prompt or lower max_tokens."
            )
        return self._loop.budget.reply_tokens(len(request.prompt), request.max_tokens, may_be_less=request.open_ended)

    # From here on: the thread that owns MLX.

    def _main(self) -> None:
        try:
            with streams().borrowed(), limits_restored():
                self._live()
        except BaseException as error:
            if self._ready.is_set():
                raise
            self._start_error = error  # raised by the thread that waits in start()
            self._ready.set()

    def _live(self) -> None:
        self._set_up()
        self._ready.set()
        while not self._stopping:
            self._turn()
        with self._lock:
            self._stopped = True
        self._receive_all()
        self._loop.fail_all("The server was stopped.")
        if self._disk is not None and self._loop.store is not None:
            unwritten = self._loop.store.flush(self._disk.flush_s)
            if unwritten.tokens:
                log.warning("%s", unwritten)
            self._loop.store.close()

    def _set_up(self) -> None:
        map_large_buffers()
        if self._limits.wired_bytes:
            mx.set_wired_limit(self._limits.wired_bytes)
        cpu.warm_up()
        self._layout = probe(self._loaded.module, self._limits.max_kv_size)
        limit_bytes = self._limits.memory_bytes or _default_limit_bytes()
        runner = Runner(self._loaded.module, self._layout)
        shape = self._shape(limit_bytes)
        self._shares = share_memory(
            limit_bytes,
            self._loaded.weight_bytes,
            remembered_scratch(self._loaded, runner, shape),
            token_bytes=least_token_bytes(self._layout, self._storage),
            context_tokens=self.context_tokens,
        )
        self._budget = make_budget(self._layout, self._shares)
        mx.set_cache_limit(self._shares.allocator_cache_bytes)
        mx.set_memory_limit(self._shares.run_ahead_bytes)
        self._cold = self._open_disk()
        self._prefill_tokens_s = measure_prefill(runner, shape.chunk_tokens)
        self._loop = self._make_loop()
        self._state = self._loop.state()

    def _shape(self, limit_bytes: int) -> Shape:
        """Of the passes to come, no longer than memory allows."""
        free_bytes = limit_bytes - self._loaded.weight_bytes
        most_tokens = free_bytes // max(1, least_token_bytes(self._layout, self._storage))
        return Shape(
            rows=self._limits.max_running,
            vocab_size=self._loaded.vocab_size,
            max_context_tokens=int(min(most_tokens, self.context_tokens)),
            chunk_tokens=self._limits.prefill_chunk_tokens or max_chunk(),
            pairs=sealed_pairs(self._layout, self._storage),
        )

    def _open_disk(self) -> Cold:
        """Raises ConfigError where the folder cannot be used."""
        if self._disk is None or any(spec.kind == "foreign" for spec in self._layout.flat()):
            return no_cold(self._layout)
        pinned: set[bytes] = set()
        # Half of what may be ahead waits in the tier, half in the store.
        ahead_bytes = min(self._disk.read_ahead_bytes, self._budget.total_bytes // READ_AHEAD_SHARE // 2)
        options = dataclasses.replace(self._disk, ttl_s=self._storage.ttl_s, read_ahead_bytes=ahead_bytes)
        tier = DiskTier(options, chain=chain, tally=tally, is_pinned=pinned.__contains__, files=self._files)
        return Cold(tier, self._layout, post=self._inbox.put, pinned=pinned, patience_s=self._disk.wait_s)

    def _make_loop(self) -> Loop:
        loop = Loop(
            Runner(self._loaded.module, self._layout),
            make_resume(
                self._loaded,
                self._layout,
                self._budget,
                self._storage,
                self._limits.max_kv_size,
                self._cold,
                self._limits.prefill_chunk_tokens,
            ),
            self._budget,
            self._limits,
            self._metrics,
            vocab_size=self._loaded.vocab_size,
            detokenizer=self._make_detokenizer,
        )
        loop.expect_prefill(self._prefill_tokens_s)
        return loop

    def _make_detokenizer(self, request: Request) -> Detokenizer:
        context = request.prompt[-CONTEXT_IDS:] if request.continues_prompt else ()
        return Detokenizer(self._loaded.tokenizer, context, special=self._special)

    def _receive(self) -> None:
        """Take in what other threads asked for; wait for it if there is nothing else to do."""
        while self._loop.idle and self._loop.has_chores and self._inbox.empty():
            self._loop.do_chores(IDLE_SLICE_S)
        if self._loop.idle and self._inbox.empty():
            mx.clear_cache()
            trim_heap()
            self._state = self._loop.state()
            self._rest()
        elif self._loop.is_stalled and self._inbox.empty():
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=self._loop.seconds_to_wait())()
        self._receive_all()

    def _rest(self) -> None:
        """Until something comes, or something stored has not been asked for in time."""
        seconds = self._loop.seconds_to_expiry()
        try:
            job = self._inbox.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except queue.Empty:
            job = self._loop.expire
        job()

    def _receive_all(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _end(self) -> None:
        self._stopping = True

    def _turn(self) -> None:
        try:
            self._receive()
            if not self._stopping and not self._loop.idle:
                self._loop.step()
        except Exception:
            # A defect of ours or of the model: those that ran lose their reply, the server goes on with a fresh loop.
            log.exception("a step failed")
            self._loop.fail_all("The engine failed while it worked on this request. See the server's log.")
            self._replace_loop()
        self._state = self._loop.state()

    def _replace_loop(self) -> None:
        failed, self._loop = self._loop, self._make_loop()
        if failed.store is not None and self._loop.store is not None:
            self._loop.store.take_over(failed.store)
        mx.clear_cache()


def _default_limit_bytes() -> int:
    machine = device()
    return min(int(machine.memory_bytes * DEFAULT_SHARE), machine.working_set_bytes)
