"""The memory plan is the same at every start, close to the memory of passes, and kept under load."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.attention.dispatch import token_ranges
from kvstrata.attention.segments import RawSegment
from kvstrata.codecs import backends
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.kernel_text import KernelLaunch
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.registry import parse
from kvstrata.engine import profiling
from kvstrata.engine.budget import Budget, KvFormat, least_token_bytes, sealed_pairs
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.memory_plan import MemoryPlan, Scratch, limit_for, plan_memory
from kvstrata.engine.profiling import PassShape, max_chunk, measure_scratch
from kvstrata.engine.request import Event, Failed, Finished, Request, Sampling
from kvstrata.engine.runner import ModelRunner
from kvstrata.kv import buffers
from kvstrata.kv.layout import LayerSpec
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.metrics import Metrics
from kvstrata.models.probe import probe
from kvstrata.platform.device import MlxBackend
from tests.support.models import VOCAB, layout_of, tiny_loaded, tiny_module

MIB, GIB = 1 << 20, 1 << 30
CONTEXT = 2048
GREEDY = Sampling(temperature=0)


def plan_of_a_start(architecture: str) -> MemoryPlan:
    limits = EngineLimits(memory_bytes=tiny_loaded(architecture).weight_bytes + 16 * MIB, prefill_chunk_tokens=64)
    engine = Engine(tiny_loaded(architecture), limits, Metrics())
    engine.start()
    engine.stop()
    return MemoryPlan(**engine.props()["memory"])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_memory_plan_is_the_same_at_every_start(
    architecture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scratch is remembered; without that, measurements on a busy machine are nearly the same."""
    measured = [plan_of_a_start(architecture).kv_bytes for _ in range(2)]
    assert max(measured) < 1.1 * min(measured)
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path))
    monkeypatch.setattr(profiling, "WORTH_KEEPING_S", 0.0)
    assert len({plan_of_a_start(architecture) for _ in range(3)}) == 1


@pytest.mark.parametrize("chunk", [32, 256])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_measured_scratch_is_close_to_the_scratch_of_longer_passes(architecture: str, chunk: int) -> None:
    loaded = tiny_loaded(architecture)
    layout = layout_of(loaded)
    runner, pairs = ModelRunner(loaded.module, layout), sealed_pairs(layout, KvConfig())
    lines = measure_scratch(runner, PassShape(1, VOCAB, CONTEXT, chunk, pairs))
    measure = profiling.ScratchProfiler(runner, CONTEXT)
    with profiling.one_operation_at_a_time():
        for context, codecs in [(0, None), (CONTEXT // 2, None), (CONTEXT // 2, pairs)]:
            taken = measure.chunk_bytes(chunk, context, codecs)
            expected = lines.bytes_for(context + chunk, 1, context + chunk)
            assert taken <= expected <= 1.5 * taken + 2 * MIB, (context, codecs)


@pytest.mark.parametrize("num_tokens", [3, 700])
def test_context_sources_on_metal_have_more_segments_than_a_launch_decodes(num_tokens: int) -> None:
    spec = LayerSpec("full", kv_heads=2, k_dim=64, v_dim=64, dtype=mx.float32)
    pair = (PlanesCodec(8), PlanesCodec(4))
    with backends.as_on_metal():
        sources = profiling.context_sources(spec, pair, num_tokens)
        assert sum(source.num_tokens for source in sources) == num_tokens
        stretches = [token_ranges(part)[0] for source in sources for part in source.segments()]
    launches: list[KernelLaunch] = []

    def see(launch: KernelLaunch) -> list[mx.array]:
        launches.append(launch)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]

    joined = metal_planes.join(stretches, mx.float32, "plain", see)
    assert joined.shape == (2, num_tokens, 64)
    assert len(launches) == (2 if num_tokens > 7 else 1)


def test_context_sources_on_cuda_include_tokens_of_another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes over these sources run on the CPU here."""
    loaded = tiny_loaded("llama")
    layout = layout_of(loaded)
    runner, storage = ModelRunner(loaded.module, layout), KvConfig(k=parse("planes:8"), v=parse("planes:4"))
    pairs = sealed_pairs(layout, storage)
    assert pairs is not None
    monkeypatch.setattr(profiling, "runtime", lambda: SimpleNamespace(backend="cuda"))
    first, second = profiling.context_sources(layout.flat()[0], pairs[0], 700)
    assert (first.num_tokens, second.num_tokens) == (350, 350)
    assert isinstance(second.segments()[0], RawSegment)
    assert measure_scratch(runner, PassShape(2, VOCAB, 700, 32, pairs)).bytes_for(700, 1, 700) > 0


@given(
    fixed_s=st.floats(1e-4, 2.0), token_s=st.floats(1e-6, 0.01), few=st.sampled_from([16, 64]), more=st.integers(1, 500)
)
def test_pass_cost_separates_the_fixed_cost_from_two_passes(
    fixed_s: float, token_s: float, few: int, more: int
) -> None:
    timed = [(tokens, fixed_s + tokens * token_s) for tokens in (few + more, few)]
    cost = profiling.pass_cost(*timed)
    # No more tokens than in the timed passes, because a longer chunk may behave differently.
    assert cost.pass_tokens == pytest.approx(min(fixed_s / token_s, few + more), rel=0.01, abs=2)
    assert cost.tokens_s == pytest.approx((few + more) / timed[0][1])
    assert cost.pass_s == pytest.approx(fixed_s + cost.pass_tokens * token_s, rel=0.01)
    assert profiling.pass_cost((64, 0.2), (16, 0.2)).pass_tokens == 64


@pytest.mark.parametrize(
    ("fixed_s", "token_s", "timed"), [(0.01, 1e-6, [64, 512, 2048]), (0.01, 1e-4, [64, 512]), (0.2, 1e-4, [64, 16])]
)
def test_fit_prefill_times_longer_passes_while_their_time_hardly_grows(
    fixed_s: float, token_s: float, timed: list[int]
) -> None:
    lengths: list[int] = []

    def time_pass(num_tokens: int) -> float:
        lengths.append(num_tokens)
        return fixed_s + num_tokens * token_s

    cost = profiling.fit_prefill(time_pass, 4096, is_cpu=False)
    assert lengths == timed
    assert cost.pass_tokens == pytest.approx(min(fixed_s / token_s, max(timed)), rel=0.01, abs=2)


def test_scratch_of_windows_does_not_grow_with_the_context() -> None:
    """A model with the layers of gemma-3-270m, of which 15 of 18 see 512 tokens.

    The budget for this model once lost 250 kB for each token of context. The hidden size is a tenth here: attention
    takes the same memory, and the rest is computed quickly.
    """
    sizes: dict[str, Any] = {
        "num_hidden_layers": 18,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    }
    module = tiny_module("gemma3_text", **sizes)
    layout = probe(module)
    shape = PassShape(16, 262_144, CONTEXT, max_chunk(), sealed_pairs(layout, KvConfig()))
    plan = plan_memory(
        int(17.6 * GIB),
        GIB,
        measure_scratch(ModelRunner(module, layout), shape),
        token_bytes=least_token_bytes(layout, KvConfig()),
        context_tokens=32_768,
        backend="metal",
    )
    assert plan.scratch_bytes < GIB
    assert plan.kv_bytes > 13 * GIB


@pytest.mark.parametrize("kv_bytes", [3 * MIB, GIB, 100 * GIB])
@pytest.mark.parametrize(("backend", "max_cached_bytes"), [("cpu", 512 * MIB), ("cuda", 4 * GIB)])
def test_limit_for_reverses_plan_memory(kv_bytes: int, backend: MlxBackend, max_cached_bytes: int) -> None:
    lines = (
        profiling.ScratchLine(5 * MIB),
        profiling.ScratchLine(MIB, 700.5),
        profiling.ScratchLine(0, 20.0, of_all_rows=True),
    )
    sizes: Any = {"token_bytes": 1000.0, "context_tokens": 40_000, "backend": backend}
    limit_bytes = limit_for(kv_bytes, 77 * MIB, Scratch(lines), **sizes)
    plan = plan_memory(limit_bytes, 77 * MIB, Scratch(lines), **sizes)
    assert plan.allocator_cache_bytes <= max_cached_bytes
    assert (plan.allocator_cache_bytes == max_cached_bytes) == (kv_bytes == 100 * GIB)
    assert plan.kv_bytes == pytest.approx(kv_bytes, rel=0.001)
    parts = (plan.weight_bytes, plan.allocator_cache_bytes, plan.scratch_bytes, plan.spare_bytes)
    assert sum(parts) + plan.kv_bytes <= limit_bytes


class MemorySampler:
    """Samples the memory that MLX holds, with its cache of freed buffers, and keeps the maximum."""

    def __init__(self, engine: Engine) -> None:
        self.most_bytes = self.most_kv_bytes = 0
        self._engine = engine
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.001):
            self.most_bytes = max(self.most_bytes, mx.get_active_memory() + mx.get_cache_memory())
            self.most_kv_bytes = max(self.most_kv_bytes, self._engine.state().kv_bytes)


def test_mlx_stays_within_the_memory_limit_while_kv_is_encoded() -> None:
    loaded = tiny_loaded("llama")
    gc.collect()
    mx.clear_cache()
    others_bytes = mx.get_active_memory() - loaded.weight_bytes  # arrays of other tests
    limit_bytes = loaded.weight_bytes + 4 * MIB
    engine = Engine(
        loaded,
        EngineLimits(memory_bytes=limit_bytes, max_running=4, prefill_chunk_tokens=64, context_tokens=1024),
        Metrics(),
        KvConfig(k=parse("planes:4"), v=parse("planes:4"), encodes_running=True),
    )
    engine.start()
    mx.reset_peak_memory()
    rng = random.Random(0)
    ended = [threading.Event() for _ in range(24)]
    try:
        with MemorySampler(engine) as sampler:
            for i, end in enumerate(ended):

                def sink(event: Event, end: threading.Event = end) -> None:
                    if isinstance(event, Finished | Failed):
                        end.set()

                prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(200, 1000)))
                engine.submit(Request(f"r{i}", prompt, 8, GREEDY), sink)
            assert all(end.wait(120) for end in ended)
        plan = MemoryPlan(**engine.props()["memory"])
    finally:
        engine.stop()
    assert sampler.most_kv_bytes > plan.kv_bytes / 2  # the load filled memory
    assert sampler.most_bytes - others_bytes <= limit_bytes
    # An exact bound, because samples may miss a peak: peak of live arrays, plus the limit of the allocator cache.
    assert mx.get_peak_memory() - others_bytes + plan.allocator_cache_bytes <= limit_bytes


@pytest.mark.parametrize("buffer_step", [1, 256], ids=["buffers of any size", "as on CUDA"])
@pytest.mark.parametrize("raw_tokens", [None, 512])
@given(num_tokens=st.integers(1, 3000), more=st.integers(0, 700))
@settings(max_examples=30)
def test_budget_counts_the_bytes_that_kv_buffers_take(
    buffer_step: int, raw_tokens: int | None, num_tokens: int, more: int
) -> None:
    layout = layout_of(tiny_loaded("llama"))
    kv_format = KvFormat(None, 100.0, raw_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "TOKENS_STEP", buffer_step)
        budget = Budget(1 << 30, layout.fixed_bytes, layout.token_bytes)
        capacity = budget.buffer_tokens(num_tokens, 0, kv_format, None)
        cache = SequenceCache(layout, None, capacity, raw_tokens=raw_tokens)
        assert budget.bytes_held_by(cache, kv_format) == budget.bytes_for(capacity, kv_format)
        growth = budget.buffer_tokens(more, capacity, kv_format, None)
        before, grown_bytes = budget.bytes_held_by(cache, kv_format), budget.growth_bytes(growth, capacity, kv_format)
        cache.grow(growth)
        assert budget.bytes_held_by(cache, kv_format) == before + grown_bytes
        assert budget.bytes_for(budget.tokens_in(50_000, kv_format), kv_format) - budget.fixed_bytes <= 50_000
