"""Engines on one store: a conversation of one resumes at the other, and no fault of the store stops a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Request
from kvstrata.errors import ConfigError
from kvstrata.kv.layout import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.tiers.interface import SharedTier
from kvstrata.tiers.lookups import Walk
from kvstrata.tiers.remote import health
from kvstrata.tiers.remote.folder_store import FolderStore
from tests.engine.drive import GREEDY
from tests.engine.test_disk import answer, cached, make_computing_slow, settle
from tests.engine.test_disk_lookups import make_computing_take_a_second
from tests.engine.test_engine import Reply
from tests.support.eventually import eventually
from tests.support.models import VOCAB, tiny_loaded
from tests.tiers.remote.stores import SLOW_S, TROUBLES, Proxy, Valkey, options_for, private_folder, secret_file

MIB = 1 << 20
ARCHITECTURES = ["llama", "gemma3_text", "qwen3_next", "mamba2", "gpt_oss"]
SLOW = [pytest.param("deepseek_v3", marks=pytest.mark.slow)]
PROMPT = tuple(i * 7 % VOCAB for i in range(700))


@contextmanager
def engine_on(
    url: str, loaded: LoadedModel, secret: Path | None = None, storage: KvConfig | None = None, **settings: Any
) -> Iterator[Engine]:
    mx.eval(arrays_in(loaded.module))  # lazy arrays belong to the thread that made them
    remote = options_for(url, secret, **settings)
    engine = Engine(loaded, EngineLimits(memory_bytes=4096 * MIB), Metrics(), storage, remote=remote)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def generate(engine: Engine, name: str, prompt: tuple[int, ...], max_tokens: int = 80) -> Reply:
    engine.ask(make_computing_slow).result(60)
    reply = Reply()
    engine.submit(Request(name, prompt, max_tokens, GREEDY), reply.sink)
    reply.wait()
    return reply


def write_to_store(engine: Engine) -> None:
    """Wait until the KV computed so far is in the store."""
    settle(engine)
    engine.ask(lambda core: core.prefix_cache.sharing.flush(30.0)).result(60)  # pyright: ignore[reportOptionalMemberAccess]


def counters(engine: Engine) -> dict[str, int]:
    return engine.ask_cache(lambda cache: cache.usage()).result(60).counters


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *SLOW])
def test_engine_resumes_a_conversation_of_another_engine(architecture: str, tmp_path: Path) -> None:
    """Beside the new tokens, each turn computes at most 256 tokens of the conversation."""
    url, secret = private_folder(tmp_path), secret_file(tmp_path)
    with engine_on(url, tiny_loaded(architecture), secret) as first:
        one = generate(first, "one", PROMPT)
        write_to_store(first)
        so_far = (*PROMPT, *one.ids)
        with engine_on(url, tiny_loaded(architecture), secret) as second:
            new = tuple(i % VOCAB for i in range(200))
            two = generate(second, "two", (*so_far, *new))
            assert cached(two) >= len(so_far) - 256
            assert cached(two) % 256 == 0
            assert counters(second)["remote_read_base"] >= 1 or architecture == "mamba2"
            write_to_store(second)
            so_far = (*so_far, *new, *two.ids)
        three = generate(first, "three", (*so_far, *new))
        assert cached(three) >= len(so_far) - 256
        assert counters(first)["remote_read_bytes"] > 0


def test_engine_resumes_a_conversation_over_every_kind_of_store(store_url: str, tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    with engine_on(store_url, tiny_loaded("llama"), secret) as first:
        one = generate(first, "one", PROMPT)
        write_to_store(first)
    with engine_on(store_url, tiny_loaded("llama"), secret) as second:
        two = generate(second, "two", (*PROMPT, *one.ids, 1, 2, 3))
        assert cached(two) == 768


def test_engine_thread_never_queries_the_store(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, asking = pytest.importorskip("redis.connection").AbstractConnection, set[str]()
    send = connection.send_packed_command

    def noted(self: Any, *args: Any, **options: Any) -> None:
        asking.add(threading.current_thread().name)
        send(self, *args, **options)

    with engine_on(redis_url, tiny_loaded("llama")) as first, engine_on(redis_url, tiny_loaded("llama")) as second:
        monkeypatch.setattr(connection, "send_packed_command", noted)
        one = generate(first, "one", PROMPT)
        write_to_store(first)
        assert cached(generate(second, "two", (*PROMPT, *one.ids, 1, 2, 3))) == 768
        write_to_store(second)
        monkeypatch.undo()

    assert {"kvstrata-tier-lookups", "kvstrata-remote-writer"} < asking
    assert "kvstrata-engine" not in asking
    assert all(name.startswith(("kvstrata-tier-", "kvstrata-remote-")) for name in asking), asking


def sealed_planes(core: EngineCore) -> dict[tuple[int, int, str], np.ndarray]:
    """Return all cached arrays in planes:8, by position and layer."""
    found: dict[tuple[int, int, str], np.ndarray] = {}
    for entry in core.prefix_cache.table.entries:
        for layer in entry.span.layers:
            for part in entry.span.sealed(layer):
                for side in ("k", "v"):
                    held = getattr(part, side)
                    for at in range(held.position, held.end - 255, 256):
                        block = held.cut(at - held.position, at - held.position + 256)
                        for name, array in block.arrays.items():
                            found[at, layer, f"{side}.{name}"] = np.array(array.astype(mx.float32))
    return found


def test_engine_loaded_planes_equal_the_written_ones(redis_url: str) -> None:
    storage = KvConfig(k=parse("planes:8"), v=parse("planes:8"))
    with engine_on(redis_url, tiny_loaded("llama"), None, storage) as first:
        generate(first, "one", PROMPT, 2)
        write_to_store(first)
        held = first.ask(sealed_planes).result(60)
    with engine_on(redis_url, tiny_loaded("llama"), None, storage) as second:
        assert cached(generate(second, "two", PROMPT, 2)) == 512
        settle(second)
        came = second.ask(sealed_planes).result(60)

    shared = [place for place in held if place[0] < 512]
    assert len(shared) > 16
    for place in shared:
        np.testing.assert_array_equal(came[place], held[place])


def test_engine_with_other_weights_loads_nothing(redis_url: str) -> None:
    with engine_on(redis_url, tiny_loaded("llama")) as first:
        generate(first, "one", PROMPT, 2)
        write_to_store(first)
        assert counters(first)["remote_written_base"] == 2
    with engine_on(redis_url, replace(tiny_loaded("llama"), fingerprint="of other weights")) as second:
        assert cached(generate(second, "two", PROMPT, 2)) == 0
        assert "remote_read_base" not in counters(second)


def test_engine_kv_below_the_remote_precision_is_not_written(redis_url: str) -> None:
    storage = KvConfig(k=parse("planes:4"), v=parse("planes:4"))
    with engine_on(redis_url, tiny_loaded("llama"), None, storage) as engine:
        generate(engine, "one", PROMPT, 2)
        write_to_store(engine)
        assert counters(engine)["remote_skipped_fewer_bits"] == 1
        assert counters(engine)["remote_written_bytes"] == 0
    with engine_on(redis_url, tiny_loaded("llama"), None, storage, precision="planes:4") as engine:
        generate(engine, "one", PROMPT, 2)
        write_to_store(engine)
        assert counters(engine)["remote_written_base"] == 2


def test_engine_unknown_remote_precision_is_refused(redis_url: str) -> None:
    with (
        pytest.raises(ConfigError, match="Unknown precision"),
        engine_on(redis_url, tiny_loaded("llama"), precision="planes:7x"),
    ):
        pass


def test_engine_load_slower_than_computing_is_given_up(server: Valkey) -> None:
    """A block takes seconds to load, and computing the prompt takes one: the load is given up after 3 % of that."""
    with engine_on(server.url, tiny_loaded("llama")) as first:
        generate(first, "one", PROMPT, 2)
        write_to_store(first)
    proxy = Proxy(server.port, bytes_per_s=20_000)
    with engine_on(f"redis://127.0.0.1:{proxy.port}/0", tiny_loaded("llama")) as second:
        second.ask(make_computing_take_a_second).result(60)
        reply = Reply()
        second.submit(Request("slow", PROMPT, 2, GREEDY), reply.sink)
        assert cached(reply) == 0
        assert counters(second).get("remote_read_base", 0) == 0, "it had gone on before the first block came"
    proxy.close()


def no_steps() -> Walk[None]:
    yield from ()


def shared_tier(engine: Engine) -> SharedTier:
    return engine.ask(lambda core: core.prefix_cache.shared.tier).result(60)  # pyright: ignore[reportOptionalMemberAccess]


def test_engine_queries_a_slow_store_again_when_its_latency_has_faded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, secret, leading = private_folder(tmp_path), secret_file(tmp_path), FolderStore.leading

    def lead_slowly(store: FolderStore, names: list[str]) -> list[int]:
        monkeypatch.setattr(FolderStore, "leading", leading)
        time.sleep(1.1)  # more than the second that a request waits at most
        return leading(store, names)

    def ask(engine: Engine, name: str) -> int:
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        found = cached(generate(engine, name, PROMPT, 2))
        assert (
            shared_tier(engine).start_lookup(no_steps(), None, lambda: None).wait(60)
        )  # questions before it have their answers
        return found

    with engine_on(url, tiny_loaded("llama"), secret) as engine:
        generate(engine, "one", PROMPT, 2)
        write_to_store(engine)
    monkeypatch.setattr(health, "LATENCY_HALF_LIFE_S", 3600.0)
    monkeypatch.setattr(health, "OLD_SHARE", 0.99)  # later answers change the latency little
    with engine_on(url, tiny_loaded("llama"), secret) as engine:
        monkeypatch.setattr(FolderStore, "leading", lead_slowly)
        assert ask(engine, "slow") == 0
        assert ask(engine, "not asked") == 0
        monkeypatch.setattr(health, "LATENCY_HALF_LIFE_S", 0.001)
        assert ask(engine, "asked") == 512


@pytest.mark.parametrize("trouble", TROUBLES)
def test_engine_store_in_trouble_stops_no_stream(server: Valkey, trouble: str) -> None:
    proxy = Proxy(server.port) if trouble == "slow" else None
    url = server.url if proxy is None else f"redis://127.0.0.1:{proxy.port}/0"
    with engine_on(url, tiny_loaded("llama")) as engine:
        alone = answer(engine, "before", 700)
        write_to_store(engine)
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        if proxy is None:
            server.cause(trouble)
        else:
            proxy.delay_s = SLOW_S
        for number in range(3):
            engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
            began_s = time.monotonic()
            reply = answer(engine, f"during {number}", 700)
            assert time.monotonic() - began_s < 5.0
            assert reply.ids[: len(alone.ids)] == alone.ids or cached(reply)
        generate(engine, "another", tuple(i * 5 % VOCAB for i in range(600)), 20)
        settle(engine)
        if trouble not in ("hangs", "slow"):
            eventually(lambda: any(name.startswith("remote_failed") for name in counters(engine)))
    if proxy is not None:
        proxy.close()
