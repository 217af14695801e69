"""The thread that owns MLX: receives commands, runs steps, rests, recovers."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import mlx.core as mx

from kvstrata.attention import cpu
from kvstrata.backend import device
from kvstrata.backend.allocator import limits_restored
from kvstrata.backend.heap import map_large_buffers, trim_heap
from kvstrata.backend.stages import begin
from kvstrata.backend.streams import streams
from kvstrata.engine.budget import least_token_bytes, sealed_pairs
from kvstrata.engine.build import ServedModel, build_core, open_disk_tier, open_shared_tier
from kvstrata.engine.config import EngineLimits, KvConfig, TierConfig
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.memory_plan import DEFAULT_SHARE, MemoryPlan, make_budget, plan_memory
from kvstrata.engine.profiling import PassShape, max_chunk, measure_prefill, remembered_scratch, warm_up_kernels
from kvstrata.engine.request import EngineState, Request
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.scheduler import PassCost
from kvstrata.engine.sequence import ENGINE_FAILED
from kvstrata.errors import Unavailable
from kvstrata.layers.kinds import Layout
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.models.probe import probe
from kvstrata.prefix_cache.sharing import SharedTierClient
from kvstrata.prefix_cache.tier_client import TierClient
from kvstrata.text.detokenizer import Detokenizer
from kvstrata.text.special import special_tokens

log = logging.getLogger(__name__)

T = TypeVar("T")

# Ids before a plain completion that the first word of its text may depend on.
CONTEXT_IDS = 8

# Without a request, until memory that was freed goes back to the system. On a GPU few other programs could use it, and
# people read for a while before they answer.
KEEPS_FREED_S = 300.0 if mx.cuda.is_available() else 5.0

# Work on stored KV while no sequence runs, until the inbox is looked at again.
IDLE_SLICE_S = 0.002


class EngineThread:
    def __init__(
        self,
        loaded: LoadedModel,
        limits: EngineLimits,
        metrics: Metrics,
        storage: KvConfig,
        outside: TierConfig,
    ) -> None:
        self._loaded = loaded
        self._limits = limits
        self._metrics = metrics
        self._storage = storage
        self._outside = outside
        self._special = special_tokens(loaded.tokenizer)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="kvstrata-engine", daemon=True)
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._lock = threading.Lock()  # guards the next one
        self._stopped = False
        self._stopping = False
        # When memory goes back to the system; None: something may have been freed since it was last decided.
        self._frees_at_s: float | None = None
        self.state = EngineState()
        # Made by the thread before start() returns.
        self.served: ServedModel
        self.shares: MemoryPlan
        self.cold: TierClient
        self.shared: SharedTierClient | None
        self.loop: EngineCore
        self._pass_cost: PassCost

    # Called by other threads.

    def start(self) -> None:
        """Blocks until the model was probed; raises what went wrong."""
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def context_tokens(self) -> int:
        return min(self._limits.context_tokens or self._loaded.context_tokens, self._loaded.context_tokens)

    def post(self, job: Callable[[], None]) -> bool:
        """Have something done between two steps. False: the thread has stopped, and does nothing any more."""
        with self._lock:
            if not self._stopped:
                self._inbox.put(job)
            return not self._stopped

    def ask(self, question: Callable[[EngineCore], T]) -> Future[T]:
        """Have the thread answer something between two steps."""
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            loop = self.loop
            try:
                with loop.stock.failures.watching():
                    result = question(loop)
                answer.set_result(result)
            except Exception as error:  # noqa: BLE001
                # The caller gets it.
                answer.set_exception(error)

        if not self.post(run):
            answer.set_exception(Unavailable("The engine has stopped."))
        return answer

    def stop(self) -> None:
        self._inbox.put(self._end)
        self._thread.join()

    # From here on: the thread itself.

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
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def _close(self) -> None:
        """Stopped, or at an end because recovery failed: from now on `post` takes nothing, and all clients hear of it.
        What running sequences have computed is written with the rest."""
        with self._lock:
            self._stopped = True
        try:
            while not self._inbox.empty():
                with _logging("A command"):
                    self._inbox.get()()
            with _logging("Ending all requests"):
                self.loop.end_all("The server was stopped." if self._stopping else ENGINE_FAILED)
            if self._stopping:
                self._write_rest()
        finally:
            self.loop.stock.close()

    def _write_rest(self) -> None:
        """To the tiers, for as long as each may take."""
        disk, remote, stock = self._outside.disk, self._outside.remote, self.loop.stock
        if disk is not None:
            unwritten = stock.flush(disk.flush_s)
            if unwritten.tokens:
                log.warning("%s", unwritten)
        if remote is not None and stock.sharing is not None:
            stock.sharing.flush(remote.flush_s)

    def _set_up(self) -> None:
        map_large_buffers()
        if self._limits.wired_bytes:
            mx.set_wired_limit(self._limits.wired_bytes)
        begin("kernels", "Loading kernels (compiled at the first start)")
        cpu.warm_up()
        begin("probe", "Trying how the model can be batched")
        layout = probe(self._loaded.module, self._limits.max_kv_size)
        warm_up_kernels(layout)
        limit_bytes = self._limits.memory_bytes or _default_limit_bytes()
        runner = ModelRunner(self._loaded.module, layout)
        shape = self._shape(layout, limit_bytes)
        begin("memory", "Measuring what forward passes take (remembered for the next start)")
        self.shares = plan_memory(
            limit_bytes,
            self._loaded.weight_bytes,
            remembered_scratch(self._loaded, runner, shape),
            token_bytes=least_token_bytes(layout, self._storage),
            context_tokens=self.context_tokens,
            backend=device().backend,
        )
        self.served = ServedModel(self._loaded, layout, make_budget(layout, self.shares), self._limits, self._storage)
        mx.set_cache_limit(self.shares.allocator_cache_bytes)
        mx.set_memory_limit(self.shares.run_ahead_bytes)
        begin("tiers", "Opening the disk cache" if self._outside.disk else "Making the cache")
        self.cold = open_disk_tier(self.served, self._outside.disk, self._outside.files, self._inbox.put)
        self.shared = self._open_remote()
        begin("speed", "Timing a short prompt")
        self._pass_cost = measure_prefill(runner, min(shape.chunk_tokens, shape.max_context_tokens))
        self.loop = self._make_loop()
        # Not after a failed step: what failed once may fail again, and a server that goes on can trace when it has to.
        self.loop.runner.trace_steps(self._limits.max_running)
        self.state = self.loop.state()

    def _open_remote(self) -> SharedTierClient | None:
        try:
            return open_shared_tier(self.served, self._outside.remote, device().backend, self._inbox.put)
        except BaseException:
            self.cold.tier.close()
            raise

    def _shape(self, layout: Layout, limit_bytes: int) -> PassShape:
        """Of the passes to come, no longer than memory allows."""
        free_bytes = limit_bytes - self._loaded.weight_bytes
        most_tokens = free_bytes // max(1, least_token_bytes(layout, self._storage))
        return PassShape(
            rows=self._limits.max_running,
            vocab_size=self._loaded.vocab_size,
            max_context_tokens=int(min(most_tokens, self.context_tokens)),
            chunk_tokens=self._limits.prefill_chunk_tokens or max_chunk(),
            pairs=sealed_pairs(layout, self._storage),
        )

    def _make_loop(self, failed: EngineCore | None = None) -> EngineCore:
        """`failed`: the loop before, where its model is well."""
        parts = (self.served, self._metrics, self.cold, self.make_detokenizer, self.shared, self._outside.watcher)
        if failed is not None:
            return build_core(*parts, runner=failed.runner, speeds=failed.speeds)
        loop = build_core(*parts)
        # Before the first request: whether it is worth waiting for the disk must be known then.
        loop.speeds.alone.add_work(1, 1 / self._pass_cost.tokens_s)
        loop.speeds.pass_cost = self._pass_cost
        return loop

    def make_detokenizer(self, request: Request) -> Detokenizer:
        context = request.prompt[-CONTEXT_IDS:] if request.continues_prompt else ()
        return Detokenizer(self._loaded.tokenizer, context, special=self._special)

    def _turn(self) -> None:
        try:
            self._receive()
            if not self._stopping and not self.loop.executor.is_idle and not self.loop.has_broken_cache:
                self._frees_at_s = None
                self.loop.executor.step()
        except Exception:
            log.exception("a step failed")
            self._recover()
        if self.loop.has_broken_cache:
            self._empty_cache()
        self.state = self.loop.state()

    def _recover(self) -> None:
        """A defect of ours or of the model: those that ran lose their reply, the server goes on with a fresh loop. A
        second fault must not keep it from that; where no loop can be made, the thread ends, and says so."""
        failed = self.loop
        with _logging("Ending the requests of a failed step"):
            failed.fail_all(ENGINE_FAILED)
        self.loop = self._make_loop()
        with _logging("Taking over counters and pins"):
            self.loop.stock.take_over(failed.stock)
        mx.clear_cache()

    def _empty_cache(self) -> None:
        """An operation of the cache failed half-way: requests go on, with an empty one."""
        log.error(
            "The cache in memory was emptied, because an operation failed half-way (the error before this one). "
            "Requests go on without it. Please report the error."
        )
        failed, self.loop = self.loop, self._make_loop(self.loop)
        self.loop.take_over(failed)

    def _receive(self) -> None:
        """Take in what other threads asked for; wait for it if there is nothing else to do."""
        loop = self.loop
        while loop.executor.is_idle and loop.pacer.has_work and self._inbox.empty():
            loop.pacer.run_slice(IDLE_SLICE_S)
        if loop.has_broken_cache:
            return
        if loop.executor.is_idle and self._inbox.empty():
            self.state = loop.state()
            self._rest()
        elif loop.executor.is_stalled and self._inbox.empty():
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=loop.admission.seconds_to_wait())()
        self._receive_all()

    def _rest(self) -> None:
        """Until something comes, or something stored has not been asked for in time. The memory that MLX has freed it
        keeps for a while: the next turn of a chat takes the same again."""
        now_s = time.monotonic()
        if self._frees_at_s is None:
            self._frees_at_s = now_s + KEEPS_FREED_S
        if now_s >= self._frees_at_s:
            self._frees_at_s = math.inf
            mx.clear_cache()
            trim_heap()
            self.state = self.loop.state()
        expires_s, frees_s = self.loop.pacer.seconds_to_expiry(), self._frees_at_s - now_s
        job = self._job_within(min(expires_s, frees_s))
        if job is not None:
            job()
        elif expires_s <= frees_s:
            self.loop.pacer.expire()
        else:
            return
        if self._frees_at_s == math.inf:
            self._frees_at_s = None

    def _job_within(self, seconds: float) -> Callable[[], None] | None:
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        return None

    def _receive_all(self) -> None:
        while not self._inbox.empty() and not self.loop.has_broken_cache:
            self._inbox.get()()

    def _end(self) -> None:
        self._stopping = True


@contextlib.contextmanager
def _logging(work: str) -> Iterator[None]:
    """An exception of work that nothing else may depend on."""
    try:
        yield
    except Exception:
        log.exception("%s failed while the engine recovered or stopped", work)


def _default_limit_bytes() -> int:
    machine = device()
    return min(int(machine.memory_bytes * DEFAULT_SHARE), machine.working_set_bytes)
