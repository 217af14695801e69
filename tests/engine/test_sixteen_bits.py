"""16-bit models through the whole engine, as a Mac runs them: after a hit, as close to float32 as mlx-lm.

The bound of tests/kv/test_sixteen_bits.py holds for the distribution of the first token after the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.request import Sampling
from kvstrata.kv.gather import num_arrays
from kvstrata.kv.packing import count_labels
from kvstrata.kv.sequence_cache import Prefix, SequenceCache
from kvstrata.kv.span import SpanRange, prefix_of
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe
from kvstrata.prefix_cache.keys import chain
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.options import DiskOptions
from tests.engine.drive import Client, Drive
from tests.kv.test_sixteen_bits import decoded
from tests.support.models import (
    CASES,
    OFFSET,
    VOCAB,
    Error,
    Sixteen,
    check,
    rms,
    sixteen,
    steady_module,
    tiny_config,
    tiny_loaded,
)

pytestmark = pytest.mark.usefixtures("as_on_metal")

FIRST_TOKEN = Sampling(temperature=0, num_logprobs=VOCAB)
CACHED, HELD = 40, 60  # tokens of the first prompt, and of a prompt that continues it
MIB = 1 << 20
WITH_DTYPE = [*((case, "bfloat16") for case in CASES), (OFFSET, "float16")]
NUM_SEEDS = 3


@contextmanager
def tier_in(folder: Path) -> Iterator[DiskTier]:
    options = DiskOptions(folder, 256 * MIB, queue_bytes=64 * MIB, reserve_bytes=0)
    tier = DiskTier(options, chain=chain, tally=count_labels)
    try:
        yield tier
    finally:
        tier.close()


def loaded_of(m: Sixteen, case: str) -> LoadedModel:
    architecture = case.split(",")[0]
    return dataclasses.replace(
        tiny_loaded(architecture),
        module=m.model,
        dtype=str(m.dtype).removeprefix("mlx.core."),
        config={**tiny_config(architecture), "case": case},
    )


def drive_with(m: Sixteen, case: str, **settings: Any) -> Drive:
    return Drive(loaded_of(m, case), EngineLimits(prefill_chunk_tokens=16), layout=m.layout, **settings)


def settle(drive: Drive) -> None:
    while drive.core.pacer.has_work:
        drive.core.pacer.run_slice(1.0)


def ask(drive: Drive, prompt: tuple[int, ...]) -> Client:
    client = drive.submit(list(prompt), 1, FIRST_TOKEN)
    drive.run()
    settle(drive)
    return client


def logprobs_of(client: Client) -> np.ndarray:
    """Return the log-probabilities of all tokens."""
    (logprob,) = client.logprobs
    values = np.full(VOCAB, np.nan)
    for token, value in logprob.top:
        values[token] = value
    assert not np.isnan(values).any()
    return values


def log_softmax(logits: mx.array) -> np.ndarray:
    wide = np.array(logits.astype(mx.float32), np.float64)
    wide = wide - wide.max()
    return wide - np.log(np.exp(wide).sum())


def logprobs_after(model: Any, layout: Any, ids: tuple[int, ...], ranges: Any = (), mark: Any = None) -> np.ndarray:
    """Return the log-probabilities of a sequence alone after these tokens, over cached ranges of them."""
    prefix = prefix_of(layout, list(ranges), mark) if ranges else None
    cache = SequenceCache(layout, model, len(ids), prefix)
    logits = model(mx.array([ids[cache.num_tokens :]]), cache=cache.caches())[0, -1]
    return log_softmax(logits)


def raw_error(m: Sixteen, drive: Drive) -> Error:
    client = ask(drive, m.ids[:HELD])
    assert client.finished.usage.cached_tokens > 0
    expected = logprobs_after(m.wide, m.wide_layout, m.ids[:HELD])
    mlx_lm_error = logprobs_after(m.model, m.layout, m.ids[:HELD])
    return Error(rms(logprobs_of(client) - expected), rms(mlx_lm_error - expected))


@pytest.mark.parametrize("case", CASES)
def test_cache_hit_is_as_exact_as_mlx_lm(case: str) -> None:
    def error(m: Sixteen) -> Error:
        drive = drive_with(m, case)
        ask(drive, m.ids[:CACHED])
        return raw_error(m, drive)

    check(case, "bfloat16", error, NUM_SEEDS)


@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen3_moe", "deepseek_v3", OFFSET])
def test_hit_on_a_part_of_a_span_is_as_exact_as_mlx_lm(case: str) -> None:
    """The prompt diverges in the middle of a cached span."""

    def error(m: Sixteen) -> Error:
        drive = drive_with(m, case)
        ask(drive, (*m.ids[:CACHED], *m.ids[:30]))
        return raw_error(m, drive)

    check(case, "bfloat16", error, NUM_SEEDS)


@pytest.mark.parametrize(("case", "dtype"), WITH_DTYPE)
def test_hit_on_the_disk_after_a_restart_is_as_exact_as_mlx_lm(case: str, dtype: str, tmp_path: Path) -> None:
    def error(m: Sixteen) -> Error:
        folder = tmp_path / str(id(m))
        with tier_in(folder) as tier:
            drive = drive_with(m, case, tier=tier)
            ask(drive, m.ids[:CACHED])
            assert not drive.prefix_cache.flush(30).tokens
        with tier_in(folder) as tier:
            drive = drive_with(m, case, tier=tier)
            drive.core.speeds.alone.add_work(1, 1.0)  # so that reading pays
            return raw_error(m, drive)

    check(case, dtype, error, NUM_SEEDS)


def encoded_error(m: Sixteen, drive: Drive) -> Error:
    """Return the error against float32 over the same planes, decoded."""
    found = drive.prefix_cache.lookup(m.ids[: HELD - 1], "")
    (entry,) = found.entries
    mark = entry.span.checkpoints.get(found.checkpoint_at or -1)
    wide, wide_mark = decoded(m.wide_layout, entry.span, mark, mx.float32)
    expected = logprobs_after(m.wide, m.wide_layout, m.ids[:HELD], [SpanRange(wide, 0, found.num_tokens)], wide_mark)
    narrow, narrow_mark = decoded(m.layout, entry.span, mark, m.dtype)
    mlx_lm_error = logprobs_after(
        m.model, m.layout, m.ids[:HELD], [SpanRange(narrow, 0, found.num_tokens)], narrow_mark
    )
    client = ask(drive, m.ids[:HELD])
    assert client.finished.usage.cached_tokens == found.num_tokens > 0
    return Error(rms(logprobs_of(client) - expected), rms(mlx_lm_error - expected))


@pytest.mark.parametrize(("case", "dtype"), WITH_DTYPE)
def test_hit_after_requantize_is_as_exact_as_decoded_kv(case: str, dtype: str) -> None:
    def error(m: Sixteen) -> Error:
        drive = drive_with(m, case, storage=KvConfig(min_quantize_tokens=0))
        ask(drive, m.ids[:CACHED])
        drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
        settle(drive)
        drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:4")))
        settle(drive)
        return encoded_error(m, drive)

    # Two of three models with experts may choose other experts: see `check`.
    check(case, dtype, error, NUM_SEEDS + 2)


@pytest.mark.parametrize("case", CASES)
def test_live_encoding_loses_little_beside_16_bits(case: str) -> None:
    """The reply reads planes, a raw window and new KV buffers of its own sequence."""
    m = sixteen(case, "bfloat16", 0)
    ids = tuple((m.ids * 8)[:500])
    drive = drive_with(
        m, case, storage=KvConfig(k=parse("planes:8"), v=parse("planes:8"), encodes_running=True, recent_raw_tokens=32)
    )
    client = drive.submit(list(ids), 40, dataclasses.replace(FIRST_TOKEN, num_logprobs=VOCAB))
    drive.run()
    settle(drive)
    reply = tuple(client.ids)
    assert len(reply) == 40
    expected = _distributions(m.wide, m.wide_layout, ids, reply)
    mlx_lm_error = rms(_distributions(m.model, m.layout, ids, reply) - expected)
    values = np.array([[value for _, value in sorted(each.top)] for each in client.logprobs])
    if case != "mamba2":  # mamba2 has no keys and values
        assert "planes:8" in drive.prefix_cache.usage.usage().by_precision
    # Compared with float32, planes:8 lose less than 16 bits.
    assert np.median(rms(values - expected)) <= 2 * np.median(mlx_lm_error)


def _distributions(model: Any, layout: Any, ids: tuple[int, ...], reply: tuple[int, ...]) -> np.ndarray:
    cache = SequenceCache(layout, model, len(ids) + len(reply))
    logits = [model(mx.array([ids]), cache=cache.caches())[0, -1]]
    cache.end_pass(len(ids))
    for token in reply[:-1]:
        logits.append(model(mx.array([[token]]), cache=cache.caches())[0, -1])
        cache.end_pass(1)
        mx.eval(logits[-1], cache.arrays())
    return np.array([log_softmax(each) for each in logits])


def test_cached_span_has_few_arrays() -> None:
    m = sixteen("llama", "bfloat16", 0)
    drive = drive_with(m, "llama", storage=KvConfig(k=parse("planes:8"), v=parse("planes:4"), min_quantize_tokens=0))
    ask(drive, m.ids[:CACHED])
    (entry,) = drive.prefix_cache.table.entries
    assert num_arrays(entry.span) == 9
    assert drive.prefix_cache.table.num_arrays == 9


def test_number_of_cached_arrays_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata.engine import build

    monkeypatch.setattr(build, "max_arrays", lambda: 40)
    m = sixteen("llama", "bfloat16", 0)
    drive = drive_with(m, "llama")
    for i in range(30):
        drive.clock.advance(1)
        # An eviction by bytes would only shorten the long spans.
        ask(drive, (i, *(m.ids * 9)[: 600 if i % 10 == 0 else 20]))
        assert drive.prefix_cache.table.num_arrays <= 30
    assert len(drive.prefix_cache.table.entries) == 15
    assert ask(drive, (29, *m.ids[:20])).finished.usage.cached_tokens == 20


def test_trimmed_span_is_gathered_again() -> None:
    m = sixteen("llama", "bfloat16", 0)
    drive = drive_with(m, "llama", storage=KvConfig(k=parse("planes:8"), v=parse("planes:8"), min_quantize_tokens=0))
    ask(drive, (m.ids * 9)[:600])
    (entry,) = drive.prefix_cache.table.entries
    drive.prefix_cache.evictor.evict_to(drive.prefix_cache.table.nbytes - 1)
    settle(drive)
    assert entry.span.num_tokens == 512
    assert num_arrays(entry.span) == 10


@pytest.mark.parametrize("num_layers", [4, 12])
def test_prefill_chunk_keeps_the_decoded_kv_of_one_layer(num_layers: int) -> None:
    """The peak does not grow with the number of layers."""
    model = steady_module("llama", num_hidden_layers=num_layers, head_dim=32)
    layout = probe(model)
    num_tokens = 4096
    k, v = (mx.random.normal((2, num_tokens, 32), key=mx.random.key(i)) for i in range(2))
    codec = parse("planes:4")
    part = SealedSegment(codec.encode(k), codec.encode(v))
    prefix = Prefix(num_tokens, ((part,),) * num_layers, (None,) * num_layers)
    cache = SequenceCache(layout, model, 16, prefix)
    mx.eval(cache.arrays())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits = model(mx.array([[1] * 16]), cache=cache.caches())
    mx.eval(logits)
    assert mx.get_peak_memory() - before < 5 * (k.nbytes + v.nbytes)
