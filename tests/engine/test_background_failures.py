"""Failing background work: it costs the span concerned, and no request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Request
from kvstrata.kv.span import Span
from kvstrata.kv.transcode import LayerTranscoder
from tests.engine.drive import GREEDY
from tests.engine.test_disk import cached, engine_on, flush_tier, make_computing_slow, settle
from tests.engine.test_disk_keeps import prompt_of
from tests.engine.test_engine import Reply
from tests.support.models import tiny_loaded

# Length of the failing span: prompt and reply without the last token, which is never fed.
FAILING_TOKENS = 600 + 9 - 1


def failing(work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a span so that it fails for one span."""

    def fail(span: Span, *given: Any, **named: Any) -> Any:
        if span.num_tokens == FAILING_TOKENS:
            raise RuntimeError("defect")
        return work(span, *given, **named)

    return fail


def ask(engine: Engine, name: str, seed: int, max_tokens: int) -> int:
    """Submit a request and return how many tokens of its prompt were cached."""
    engine.ask(make_computing_slow).result(60)
    reply = Reply()
    engine.submit(Request(name, prompt_of(seed), max_tokens, GREEDY), reply.sink)
    num_cached = cached(reply)
    settle(engine)
    assert engine.ask(flush_tier).result(60)
    return num_cached


def counters(engine: Engine) -> dict[str, int]:
    return engine.ask(lambda core: dict(CacheApi(core).usage().counters)).result(60)


def num_logged(caplog: pytest.LogCaptureFixture) -> int:
    return len([record for record in caplog.records if "defect" in record.getMessage()])


def test_span_stays_raw_after_transcoding_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advance = LayerTranscoder.advance
    fail = failing(lambda span, transcoding, **named: advance(transcoding, span, **named))
    monkeypatch.setattr(LayerTranscoder, "advance", lambda transcoding, span, **named: fail(span, transcoding, **named))
    with engine_on(tmp_path, tiny_loaded("llama"), KvConfig(k=parse("planes:8"), v=parse("planes:8"))) as engine:
        assert [ask(engine, "failing", 1, 9), ask(engine, "good", 2, 5)] == [0, 0]
        assert [ask(engine, "failing again", 1, 9), ask(engine, "good again", 2, 5)] == [599, 599]
        assert counters(engine)["failed_rewrites"] == 1
        assert set(engine.ask(lambda core: CacheApi(core).usage().tiers["hot"].by_precision).result(60)) == {
            "raw",
            "planes:8",
        }
    assert num_logged(caplog) == 1


def test_packing_failure_leaves_only_its_span_unwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvstrata.prefix_cache import offload

    monkeypatch.setattr(offload, "pack", failing(offload.pack))
    loaded = tiny_loaded("llama")
    with engine_on(tmp_path, loaded, KvConfig()) as engine:
        assert [ask(engine, "failing", 1, 9), ask(engine, "good", 2, 5)] == [0, 0]
        assert [ask(engine, "failing again", 1, 9), ask(engine, "good again", 2, 5)] == [599, 599]
        assert counters(engine)["failed_spills"] == 1
    assert num_logged(caplog) == 1
    with engine_on(tmp_path, loaded) as engine:
        assert [ask(engine, "failing", 1, 9), ask(engine, "good", 2, 5)] == [0, 599]


def test_prefix_is_computed_after_promotion_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvstrata.prefix_cache import prefetch

    loaded = tiny_loaded("llama")
    with engine_on(tmp_path, loaded) as engine:
        assert [ask(engine, "one", 1, 9), ask(engine, "two", 2, 5)] == [0, 0]
    promote = prefetch.join_blocks

    def fail_once(*_: Any) -> Any:
        monkeypatch.setattr(prefetch, "join_blocks", promote)
        raise RuntimeError("defect")

    monkeypatch.setattr(prefetch, "join_blocks", fail_once)
    with engine_on(tmp_path, loaded) as engine:
        assert [ask(engine, "one", 1, 9), ask(engine, "two", 2, 5)] == [0, 599]
        assert counters(engine)["failed_promotions"] == 1
    assert num_logged(caplog) == 1
