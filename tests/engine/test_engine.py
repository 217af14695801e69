"""The engine as other threads see it: refusals, cancellation, failure, shutdown."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
import pytest

from kvstrata.engine import thread as engine_thread
from kvstrata.engine.background import BackgroundPacer
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Event, Failed, Finished, Request, Sampling, TextDelta
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.thread import TierEvent
from kvstrata.errors import ConfigError, ContextTooLong, InvalidRequest, ModelError, NeverFits, QueueFull, Unavailable
from kvstrata.kv import buffers
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.platform.mlx_streams import MlxStreams
from tests.support.eventually import eventually
from tests.support.models import tiny_loaded, tiny_module

GREEDY = Sampling(temperature=0)
MIB = 1 << 20


@contextmanager
def running(loaded: LoadedModel, **limits: Any) -> Iterator[Engine]:
    engine = Engine(loaded, EngineLimits(**limits), Metrics())
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


class Reply:
    """Collects the events of a request, and waits for its end without polling."""

    def __init__(self, on_event: Callable[[Event], None] = lambda _: None) -> None:
        self.events: list[Event] = []
        self._on_event = on_event
        self._ended = threading.Event()

    def sink(self, event: Event) -> None:
        self.events.append(event)
        self._on_event(event)
        if isinstance(event, Finished | Failed):
            self._ended.set()

    def wait(self) -> Finished | Failed:
        assert self._ended.wait(60)
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    @property
    def ids(self) -> list[int]:
        return [id_ for event in self.events if isinstance(event, TextDelta) for id_ in event.ids]


def request(id_: str, length: int = 8, max_tokens: int = 4, **fields: Any) -> Request:
    return Request(id_, tuple(range(length)), max_tokens, **{"sampling": GREEDY, **fields})


def test_engine_answers_requests_from_many_threads() -> None:
    with running(tiny_loaded("llama")) as engine:
        replies = [Reply() for _ in range(24)]
        threads = [
            threading.Thread(target=engine.submit, args=(request(f"r{i}", 5 + i), reply.sink))
            for i, reply in enumerate(replies)
        ]
        for thread in threads:
            thread.start()
        assert all(isinstance(reply.wait(), Finished) for reply in replies)
        assert all(len(reply.ids) == 4 for reply in replies)
        assert engine.idle()


@pytest.fixture(params=[1, 256], ids=["buffers of any size", "as on CUDA"])
def buffer_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    step = max(request.param, buffers.TOKENS_STEP)
    monkeypatch.setattr(buffers, "TOKENS_STEP", step)
    return step


def most_tokens_of(engine: Engine, buffer_step: int) -> int:
    """Return the longest sequence that runs alone. Its last KV buffer may be larger than needed."""
    return engine.props()["kv_budget_bytes"] // engine.props()["kv_bytes_per_token"] - (buffer_step - 1)


def test_submit_refuses_impossible_requests_with_figures(buffer_step: int) -> None:
    loaded = tiny_loaded("llama", 4)
    # Small chunks keep the scratch small beside the cache.
    with running(loaded, memory_bytes=loaded.weight_bytes + 3 * MIB // 2, prefill_chunk_tokens=16) as engine:
        most_tokens = most_tokens_of(engine, buffer_step)
        assert 0 < most_tokens < 1100
        with pytest.raises(ContextTooLong, match=r"context is 8192 tokens.*needs 8200: 8000 in the prompt and 200"):
            engine.submit(request("long", 8000, 200), Reply().sink)
        with pytest.raises(
            NeverFits, match=rf"8000 tokens of prompt and 10 of reply need 7 MiB.*budget is . MiB, {most_tokens} tok"
        ):
            engine.submit(request("large", 8000, 10), Reply().sink)
        with pytest.raises(NeverFits, match="lower max_tokens"):
            engine.submit(request("long reply", 100, 8000), Reply().sink)
        with pytest.raises(InvalidRequest, match="empty"):
            engine.submit(request("empty", 0), Reply().sink)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            engine.submit(request("none", 3, 0), Reply().sink)


def test_open_ended_reply_ends_at_the_memory_limit(buffer_step: int) -> None:
    loaded = tiny_loaded("llama")
    limits = {"prefill_chunk_tokens": 16, "buffer_step_tokens": 64}
    with running(loaded, memory_bytes=loaded.weight_bytes + MIB, **limits) as engine:
        reply = Reply()
        engine.submit(request("r", 100, 8000, open_ended=True), reply.sink)
        end = reply.wait()
        assert isinstance(end, Finished)
        assert end.reason == "length"
        # The model never reads the last token of a reply.
        assert end.usage.completion_tokens == most_tokens_of(engine, buffer_step) - 100 + 1


def test_submit_refuses_requests_beyond_the_queue() -> None:
    with running(tiny_loaded("llama"), max_running=1, max_waiting=2) as engine:
        replies = [Reply() for _ in range(3)]
        for i, reply in enumerate(replies):
            engine.submit(request(f"r{i}", max_tokens=8000), reply.sink)
        with pytest.raises(QueueFull):
            engine.submit(request("r3"), Reply().sink)
        with pytest.raises(InvalidRequest, match="running already"):
            engine.submit(request("r0"), Reply().sink)
        for i in range(3):
            engine.cancel(f"r{i}")
        assert [reply.wait() for reply in replies]
        engine.submit(request("r3"), (last := Reply()).sink)
        assert isinstance(last.wait(), Finished)


def test_shared_queue_gives_an_owner_at_most_half_of_the_other_places() -> None:
    with running(tiny_loaded("llama"), max_running=1, max_waiting=7, shares_queue=True) as engine:
        replies: dict[str, list[Reply]] = {"a": [], "b": [], "c": []}

        def fill(owner: str) -> int:
            while True:
                number = len(replies[owner])
                salt = owner if number % 2 else f"{owner}:inner"
                reply = Reply()
                try:
                    engine.require_place(owner)
                    engine.submit(request(f"{owner}{number}", max_tokens=8000, salt=salt), reply.sink)
                except QueueFull:
                    return number
                replies[owner].append(reply)

        assert [fill(owner) for owner in ("a", "b", "c")] == [4, 2, 1]
        with pytest.raises(QueueFull, match="4 requests of this key"):
            engine.require_place("a")
        engine.require_place("d")
        for number in range(2):
            engine.cancel(f"a{number}")
            replies["a"][number].wait()
        engine.require_place("a")


def test_idle_engine_expires_entries_and_rests_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_loaded("llama")
    mx.eval(loaded.module.parameters())
    engine = Engine(loaded, EngineLimits(), Metrics(), KvConfig(ttl_s=0.5))
    held, has_expired = [], threading.Event()
    expire = BackgroundPacer.expire

    def recording_expire(housekeeping: BackgroundPacer) -> None:
        held.append(housekeeping._memory.cached_bytes)
        expire(housekeeping)
        if not housekeeping._memory.cached_bytes:
            has_expired.set()

    monkeypatch.setattr(BackgroundPacer, "expire", recording_expire)
    engine.start()
    try:
        engine.submit(request("r", 200), (reply := Reply()).sink)
        reply.wait()
        assert has_expired.wait(30)
        assert held[0] > 0
        assert len(held) <= 3  # it rested in between
        assert engine.state().cached_bytes == 0
    finally:
        engine.stop()


def test_drain_refuses_new_requests_and_finishes_old_ones() -> None:
    with running(tiny_loaded("llama")) as engine:
        reply = Reply()
        engine.submit(request("r", max_tokens=200), reply.sink)
        engine.drain()
        with pytest.raises(Unavailable):
            engine.submit(request("late"), Reply().sink)
        end = reply.wait()
        assert isinstance(end, Finished)
        assert end.usage.completion_tokens == 200


def test_stop_fails_open_requests() -> None:
    engine = Engine(tiny_loaded("llama"), EngineLimits(max_running=1), Metrics())
    engine.start()
    replies = [Reply() for _ in range(2)]
    for i, reply in enumerate(replies):
        engine.submit(request(f"r{i}", max_tokens=8000), reply.sink)
    engine.stop()
    assert all(isinstance(reply.wait(), Failed) for reply in replies)


def test_cancelled_requests_leave_no_memory_behind() -> None:
    rng = random.Random(3)
    with running(tiny_loaded("qwen3_next"), max_running=8) as engine:
        engine.submit(request("warm"), (warm := Reply()).sink)
        warm.wait()
        before = _settled_memory(engine)
        replies = []
        for i in range(200):
            leaves_after = rng.randrange(12)
            leaving = iter(range(leaves_after))

            def leave(_: Event, i: int = i, leaving: Iterator[int] = leaving) -> None:
                if next(leaving, None) is None:
                    engine.cancel(f"r{i}")

            replies.append(Reply(leave))
            engine.submit(request(f"r{i}", rng.randint(1, 300), 400), replies[-1].sink)
        assert {type(reply.wait()) for reply in replies} == {Finished}
        assert engine.idle()
        after = _settled_memory(engine)
        assert engine.state().running == engine.state().waiting == 0
    assert after <= before * 1.01


def _settled_memory(engine: Engine) -> int:
    """Return MLX's active memory after all background work, with an empty cache."""

    def measure(core: EngineCore) -> int:
        while core.prefix_cache.has_work:
            core.prefix_cache.run_background(1.0)
        core.prefix_cache.evictor.clear()
        return mx.get_active_memory()

    return engine.ask(measure).result(60)


class Brittle(nn.Module):
    """A model that raises for one token."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.layers = module.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        if 77 in tokens.tolist()[0]:  # pyright: ignore[reportIndexIssue, reportOperatorIssue]
            raise RuntimeError("defect")
        return self.module(tokens, cache=cache)


def test_failed_step_fails_its_requests_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    loaded = dataclasses.replace(tiny_loaded("llama"), module=Brittle(tiny_module("llama")))
    with running(loaded) as engine:
        engine.submit(Request("bad", (77, 1, 2), 4, GREEDY), (bad := Reply()).sink)
        end = bad.wait()
        assert isinstance(end, Failed)
        assert "server's log" in end.message
        assert "defect" in caplog.text
        engine.submit(request("good"), (good := Reply()).sink)
        assert isinstance(good.wait(), Finished)


def test_prompt_ids_are_used_without_a_copy_and_refused_for_another_prompt() -> None:
    prompt = tuple(range(1, 40))
    ids = np.array(prompt, np.int32)
    asked = Request("a", prompt, 4, GREEDY, prompt_ids=ids)
    sequence = Sequence(asked, lambda _: None, 4, 0)
    assert sequence.ids() is ids
    sequence.tokens.append(7)
    assert sequence.ids().tolist() == [*prompt, 7]
    assert Sequence(Request("a", prompt, 4, GREEDY), lambda _: None, 4, 0).ids().tolist() == list(prompt)
    for other in (prompt[:-1], (*prompt[:-1], 50), (*prompt[:9], 50, *prompt[10:])):
        with pytest.raises(ValueError, match="another prompt"):
            dataclasses.replace(asked, prompt=other)


def test_steps_are_traced_at_the_start_and_not_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a step may come back in tracing, and the thread must serve later requests."""
    traced: list[int] = []
    monkeypatch.setattr(ModelRunner, "trace_steps", lambda _, most_rows: traced.append(most_rows))
    loaded = dataclasses.replace(tiny_loaded("llama"), module=Brittle(tiny_module("llama")))
    with running(loaded, max_running=3) as engine:
        engine.submit(Request("bad", (77, 1, 2), 4, GREEDY), (bad := Reply()).sink)
        assert isinstance(bad.wait(), Failed)
        engine.submit(request("good"), (good := Reply()).sink)
        assert isinstance(good.wait(), Finished)
        assert traced == [3]


def test_failed_sink_fails_no_other_request(caplog: pytest.LogCaptureFixture) -> None:
    def sink(_: Event) -> None:
        raise ValueError("gone")

    with running(tiny_loaded("qwen3_next")) as engine:
        engine.submit(request("good", max_tokens=30), (good := Reply()).sink)
        engine.submit(request("bad"), sink)
        assert isinstance(good.wait(), Finished)
        assert engine.alive
    assert "gone" in caplog.text


def test_failed_tier_event_fails_requests_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with running(tiny_loaded("qwen3_next")) as engine:
        replies = [Reply() for _ in range(2)]
        for i, reply in enumerate(replies):
            engine.submit(request(f"r{i}", max_tokens=8000), reply.sink)
        engine._thread.post(TierEvent(fail))
        assert all(isinstance(reply.wait(), Failed) for reply in replies)
        engine.submit(request("next"), (following := Reply()).sink)
        assert isinstance(following.wait(), Finished)
    assert "out of memory" in caplog.text


def test_fault_during_recovery_costs_no_later_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: ModelRunner) -> None:
        raise RuntimeError("second defect")

    monkeypatch.setattr(ModelRunner, "abandon", fail)
    loaded = dataclasses.replace(tiny_loaded("llama"), module=Brittle(tiny_module("llama")))
    with running(loaded) as engine:
        engine.submit(Request("bad", (77, 1, 2), 4, GREEDY), (bad := Reply()).sink)
        assert isinstance(bad.wait(), Failed)
        engine.submit(request("next"), (following := Reply()).sink)
        assert isinstance(following.wait(), Finished)
        assert engine.idle()
    assert "second defect" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_that_cannot_recover_answers_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    loaded = dataclasses.replace(tiny_loaded("llama"), module=Brittle(tiny_module("llama")))
    with running(loaded, max_running=1) as engine:
        monkeypatch.setattr(engine_thread, "build_core", fail)
        replies = [Reply() for _ in range(3)]
        may_answer = threading.Event()
        asked = engine.ask(lambda _: may_answer.wait(60))  # all commands arrive before the first one runs
        for i, reply in enumerate(replies):
            engine.submit(Request(f"r{i}", (77, 1, 2), 4, GREEDY), reply.sink)
        may_answer.set()
        assert asked.result(60)
        assert all(isinstance(reply.wait(), Failed) for reply in replies)
        eventually(lambda: not engine.alive, 60)
        with pytest.raises(Unavailable, match="Restart"):
            engine.submit(request("late"), Reply().sink)
        with pytest.raises(Unavailable):
            engine.ask(lambda _: None).result(60)
        assert engine.idle()


class Broken(nn.Module):
    """A model that always raises."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.layers = module.layers

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        raise RuntimeError("no such kernel")


def test_start_raises_for_a_model_that_cannot_run() -> None:
    loaded = dataclasses.replace(tiny_loaded("llama"), module=Broken(tiny_module("llama")))
    with pytest.raises(ModelError, match="no such kernel"):
        Engine(loaded, EngineLimits(), Metrics()).start()


def test_start_raises_for_a_memory_limit_below_the_weights() -> None:
    with pytest.raises(ConfigError, match="Raise --memory-limit"):
        Engine(tiny_loaded("llama"), EngineLimits(memory_bytes=1000), Metrics()).start()


def test_stopped_and_failed_engines_leave_no_threads_behind() -> None:
    """Threads are counted by the system, because MLX starts threads that Python does not know."""
    process = psutil.Process()
    broken = dataclasses.replace(tiny_loaded("llama"), module=Broken(tiny_module("llama")))

    def live_and_end() -> None:
        with running(tiny_loaded("llama")) as engine:
            engine.submit(request("one"), (reply := Reply()).sink)
            assert isinstance(reply.wait(), Finished)
        with pytest.raises(ModelError):
            Engine(broken, EngineLimits(), Metrics()).start()

    live_and_end()
    num_threads = process.num_threads()
    for _ in range(4):
        live_and_end()
    # Threads that were just joined may not have ended in the system.
    eventually(lambda: process.num_threads() <= num_threads + 1)


def test_start_raises_when_no_stream_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: MlxStreams) -> None:
        raise RuntimeError("no thread can be started")

    monkeypatch.setattr(MlxStreams, "_take", refuse)
    with pytest.raises(RuntimeError, match="no thread can be started"):
        Engine(tiny_loaded("llama"), EngineLimits(), Metrics()).start()


def test_default_model_replies_are_the_same_in_a_batch(default_model: LoadedModel) -> None:
    questions = ["What is the capital of France?", "Name a colour.", "Count to three.", "What is water made of?"]
    questions += ["Who wrote Hamlet?", "What is 2 + 2?", "Say hello.", "Name a planet."]
    prompts = [_chat(default_model, question) for question in questions]
    # The first request ends after the last has joined.
    requests = [Request(f"q{i}", prompt, 8 + i, GREEDY) for i, prompt in enumerate(prompts)]
    with running(default_model) as engine:
        alone = [_replies(engine, [request])[0] for request in requests]
        together = _replies(engine, requests)
    assert [reply.ids for reply in together] == [reply.ids for reply in alone]
    assert [len(reply.ids) for reply in together] == [request.max_tokens for request in requests]


def _chat(loaded: LoadedModel, question: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": question}]
    return tuple(loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def _replies(engine: Engine, requests: list[Request]) -> list[Reply]:
    """Submit each request when the one before has its first token, and wait for all."""
    replies: list[Reply] = []

    def submit_next(event: Event | None = None) -> None:
        began = event is None or (isinstance(event, TextDelta) and len(replies[-1].ids) == 1)
        if began and len(replies) < len(requests):
            replies.append(Reply(submit_next))
            engine.submit(requests[len(replies) - 1], replies[-1].sink)

    submit_next()
    for i in range(len(requests)):
        assert isinstance(replies[i].wait(), Finished)
    return replies
