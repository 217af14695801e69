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
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

import mlx.core as mx

from kvstrata.engine.build import OpenTiers, ServedModel, build_core, open_tiers, prepare_model
from kvstrata.engine.config import EngineLimits, KvConfig, TierConfig
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import EngineState, FinishReason
from kvstrata.engine.sequence import ENGINE_FAILED, Sequence
from kvstrata.errors import Unavailable
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.platform.memory import limits_restored, trim_heap
from kvstrata.platform.mlx_streams import streams

log = logging.getLogger(__name__)

T = TypeVar("T")

# Idle time until freed memory goes back to the system. On a GPU few other programs could use that memory, and people
# read a reply for a while before they send the next message.
KEEPS_FREED_S = 300.0 if mx.cuda.is_available() else 5.0


@dataclass(frozen=True)
class Submit:
    """Command: enqueue a sequence."""

    sequence: Sequence


@dataclass(frozen=True)
class EndRequest:
    """Command: end a request before the model ends it."""

    request_id: str
    reason: FinishReason


@dataclass(frozen=True)
class CoreQuestion:
    """Command: call a function with the engine core, and give its result or exception to the caller."""

    function: Callable[[EngineCore], Any]
    answer: Future[Any]


@dataclass(frozen=True)
class TierEvent:
    """Command: handle a tier's result, such as a block that was read."""

    handle: Callable[[], None]


@dataclass(frozen=True)
class Stop:
    """Command: end the thread."""


EngineCommand = Submit | EndRequest | CoreQuestion | TierEvent | Stop


class EngineThread:
    """The thread that owns MLX. Other threads post commands, which it runs between two steps."""

    def __init__(
        self, loaded: LoadedModel, limits: EngineLimits, metrics: Metrics, kv_config: KvConfig, tiers: TierConfig
    ) -> None:
        self._loaded = loaded
        self._limits = limits
        self._metrics = metrics
        self._kv_config = kv_config
        self._tiers = tiers
        self._inbox: queue.SimpleQueue[EngineCommand] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="kvstrata-engine", daemon=True)
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._lock = threading.Lock()  # guards _stopped
        self._stopped = False
        self._stopping = False
        # When freed memory goes back to the system; inf: it has gone; None: memory may have been freed since.
        self._frees_at_s: float | None = None
        self.state = EngineState()
        # The thread sets these before start() returns.
        self.served: ServedModel
        self.core: EngineCore
        self._open_tiers: OpenTiers

    # Called by other threads.

    def start(self) -> None:
        """Start the thread, and wait until the engine can serve. Raises the error that prevents it."""
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, command: EngineCommand) -> bool:
        """Have a command run between two steps. False: the thread has stopped and runs no more commands."""
        with self._lock:
            if not self._stopped:
                self._inbox.put(command)
            return not self._stopped

    def ask(self, question: Callable[[EngineCore], T]) -> Future[T]:
        """Have the thread call a function with the engine core between two steps."""
        answer: Future[T] = Future()
        if not self.post(CoreQuestion(question, answer)):
            answer.set_exception(Unavailable("The engine has stopped."))
        return answer

    def stop(self) -> None:
        """End the thread, and wait until the tiers have written what they can."""
        self._inbox.put(Stop())
        self._thread.join()

    # Called by the thread itself.

    def _main(self) -> None:
        try:
            with streams().borrowed(), limits_restored():
                self._run_until_stopped()
        except BaseException as error:
            if self._ready.is_set():
                raise
            self._start_error = error  # start() raises it in the caller's thread
            self._ready.set()

    def _run_until_stopped(self) -> None:
        self._set_up()
        self._ready.set()
        try:
            while not self._stopping:
                self._run_once()
        finally:
            self._close()

    def _close(self) -> None:
        """End every request after a stop or a failed recovery; `post` takes no command from now on.

        Tokens that running sequences have computed are written with the rest of the cache.
        """
        with self._lock:
            self._stopped = True
        try:
            while not self._inbox.empty():
                with _logging("A command"):
                    self._run_command(self._inbox.get())
            with _logging("Ending all requests"):
                self.core.end_all("The server was stopped." if self._stopping else ENGINE_FAILED)
            if self._stopping:
                self._flush_tiers()
        finally:
            self.core.prefix_cache.close()

    def _flush_tiers(self) -> None:
        """Write unwritten entries to each tier, within the time that its settings allow."""
        disk, remote, prefix_cache = self._tiers.disk, self._tiers.remote, self.core.prefix_cache
        if disk is not None:
            unwritten = prefix_cache.flush(disk.flush_s)
            if unwritten.tokens:
                log.warning("%s", unwritten)
        if remote is not None and prefix_cache.sharing is not None:
            prefix_cache.sharing.flush(remote.flush_s)

    def _set_up(self) -> None:
        self.served = prepare_model(self._loaded, self._limits, self._kv_config)
        self._open_tiers = open_tiers(self.served, self._tiers, lambda handle: self._inbox.put(TierEvent(handle)))
        self.core = self._build_core()
        # Recovery traces no steps: the fault of a step may come back in tracing, and would end the thread.
        self.core.runner.trace_steps(self._limits.max_running)
        self.state = self.core.state()

    def _build_core(self, replaced: EngineCore | None = None) -> EngineCore:
        return build_core(self.served, self._open_tiers, self._metrics, replaced=replaced)

    def _run_once(self) -> None:
        """Run the commands that have arrived, then a step."""
        try:
            for command in self._receive():
                self._run_command(command)
            if not self._stopping and not self.core.executor.is_idle and not self.core.has_broken_cache:
                self._frees_at_s = None
                self.core.executor.step()
        except Exception:
            log.exception("a step failed")
            self._recover()
        if self.core.has_broken_cache:
            self._empty_cache()
        self.state = self.core.state()

    def _recover(self) -> None:
        """Fail all requests after a defect of ours or of the model, and go on with a new engine core.

        A second fault in between is logged. Where no core can be built, the thread ends and fails all requests.
        """
        failed = self.core
        with _logging("Ending the requests of a failed step"):
            failed.fail_all(ENGINE_FAILED)
        self.core = self._build_core()
        with _logging("Taking over counters, pins and conversations"):
            self.core.prefix_cache.take_over(failed.prefix_cache)
        mx.clear_cache()

    def _empty_cache(self) -> None:
        """Replace a prefix cache in which an operation failed half-way by an empty one. Requests go on."""
        log.error(
            "The cache in memory was emptied, because an operation failed half-way (the error before this one). "
            "Requests go on without it. Please report the error."
        )
        failed, self.core = self.core, self._build_core(replaced=self.core)
        self.core.take_over(failed)

    def _receive(self) -> Iterator[EngineCommand]:
        """Yield the commands that have arrived, one by one. While nothing can run, wait for the first.

        All that other threads want of the engine core comes through here, and in this order.
        """
        first = self._wait_while_idle()
        if first is not None:
            yield first
        while not self._inbox.empty() and not self.core.has_broken_cache:
            yield self._inbox.get()

    def _wait_while_idle(self) -> EngineCommand | None:
        """While no step can run, work in the background, then wait for a command. None: a step can run, commands have
        arrived, or the wait is over."""
        core = self.core
        while core.executor.is_idle and core.pacer.has_work and self._inbox.empty():
            core.pacer.run_idle()
        if core.has_broken_cache or not self._inbox.empty():
            return None
        if core.executor.is_idle:
            self.state = core.state()
            return self._rest()
        return self._wait_for_command(core.admission.seconds_to_wait()) if core.executor.is_stalled else None

    def _rest(self) -> EngineCommand | None:
        """Wait for a command, or until cached entries expire. Drop expired entries, and return the command.

        MLX keeps freed memory for a while, because the next turn of a chat takes the same again.
        """
        now_s = time.monotonic()
        if self._frees_at_s is None:
            self._frees_at_s = now_s + KEEPS_FREED_S
        if now_s >= self._frees_at_s:
            self._frees_at_s = math.inf
            mx.clear_cache()
            trim_heap()
            self.state = self.core.state()
        expires_s, frees_s = self.core.pacer.seconds_to_expiry(), self._frees_at_s - now_s
        command = self._wait_for_command(min(expires_s, frees_s))
        expires = command is None and expires_s <= frees_s
        if expires:
            self.core.pacer.expire()
        if (command is not None or expires) and self._frees_at_s == math.inf:
            self._frees_at_s = None
        return command

    def _wait_for_command(self, seconds: float) -> EngineCommand | None:
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        return None

    def _run_command(self, command: EngineCommand) -> None:
        match command:
            case Submit(sequence):
                self.core.executor.enqueue_sequence(sequence)
            case EndRequest(request_id, reason):
                self.core.executor.end_request(request_id, reason)
            case CoreQuestion():
                self._answer(command)
            case TierEvent(handle):
                handle()
            case Stop():
                self._stopping = True
            case _:
                assert_never(command)

    def _answer(self, question: CoreQuestion) -> None:
        if not question.answer.set_running_or_notify_cancel():
            return
        try:
            with self.core.prefix_cache.failures.breaking_on_error():
                result = question.function(self.core)
            question.answer.set_result(result)
        except Exception as error:  # noqa: BLE001
            # The caller gets it.
            question.answer.set_exception(error)


@contextlib.contextmanager
def _logging(work: str) -> Iterator[None]:
    """Log an exception of this work instead of raising it, because recovery and stopping must go on."""
    try:
        yield
    except Exception:
        log.exception("%s failed while the engine recovered or stopped", work)
