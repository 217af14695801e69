"""Forecasts of a model that is not loaded, compared with an engine that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.codecs.registry import parse
from kvstrata.engine import build
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.memory_plan import Forecast, Scratch, advise, expected_scratch, forecast, needs_live
from kvstrata.engine.request import Request
from kvstrata.kv.layout import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel, load
from kvstrata.models.outline import ModelOutline, outline, outline_layers
from kvstrata.platform.device import mlx_backend
from kvstrata.tiers.options import DiskOptions
from tests.engine.drive import GREEDY, Drive
from tests.engine.test_engine import Reply
from tests.models.conftest import write_model
from tests.support.models import ARCHITECTURES, FOREIGN, VOCAB, tiny_config, tiny_loaded, tiny_module

MIB = 1 << 20
LIMIT_BYTES = 1024 * MIB
BACKEND = mlx_backend()
# Largest difference between the forecast and the measured budget for KV, as a share of the budget.
NEAR = 0.1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Scratch]:
    """Collects the scratch of every engine that starts."""
    seen: list[Scratch] = []
    measure = build.remembered_scratch

    def remembered(*args: object) -> Scratch:
        seen.append(measure(*args))  # pyright: ignore[reportArgumentType]
        return seen[-1]

    monkeypatch.setattr(build, "remembered_scratch", remembered)
    return seen


@contextmanager
def started(loaded: LoadedModel, storage: KvConfig, disk: DiskOptions | None = None) -> Iterator[Engine]:
    mx.eval(arrays_in(loaded.module))  # lazy arrays belong to this thread
    engine = Engine(loaded, EngineLimits(memory_bytes=LIMIT_BYTES), Metrics(), storage, disk)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def outline_of(architecture: str) -> ModelOutline:
    """Return the outline of a test model, without a folder."""
    layout, logits = outline_layers(tiny_module(architecture), is_mla=architecture.startswith("deepseek"))
    loaded = tiny_loaded(architecture)
    return ModelOutline(
        name=loaded.name,
        backend=BACKEND,
        layout=layout,
        weight_bytes=loaded.weight_bytes,
        file_bytes=loaded.weight_bytes,
        context_tokens=loaded.context_tokens,
        vocab_size=logits.shape[-1],
        num_heads=4,
        widest=128,
        dtype="float32",
    )


# Kinds of layers: full, window, recurrent, composite, MLA, foreign. Each start of an engine takes seconds.
FEW = ("llama", "gemma3_text", "qwen3_5", "falcon_h1", "deepseek_v3", FOREIGN)
RAW, MIXED = ("raw", "raw"), ("planes:8", "planes:4")
STARTS = [
    *((architecture, RAW) for architecture in FEW),
    ("llama", MIXED),
    *(pytest.param(each, RAW, marks=pytest.mark.slow) for each in ARCHITECTURES if each not in FEW),
    *(pytest.param(each, MIXED, marks=pytest.mark.slow) for each in ARCHITECTURES if each not in ("llama", "mamba2")),
]


@pytest.mark.parametrize(("architecture", "names"), STARTS)
def test_forecast_agrees_with_the_engine(
    tmp_path: Path, architecture: str, names: tuple[str, str], measured: list[Scratch]
) -> None:
    folder = write_model(tmp_path / architecture, tiny_module(architecture), tiny_config(architecture))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = outline(str(folder), BACKEND, limit_bytes=LIMIT_BYTES)
    assert mx.get_peak_memory() - before < 1 << 16  # no weight was read, nothing was computed

    loaded = load(str(folder), memory_limit_bytes=LIMIT_BYTES)
    assert model.weight_bytes == loaded.weight_bytes
    assert (model.context_tokens, model.vocab_size) == (loaded.context_tokens, loaded.vocab_size)
    with started(loaded, KvConfig(k=parse(names[0]), v=parse(names[1]))) as engine:
        props = engine.props()
    exact = forecast(model, LIMIT_BYTES, precisions=[names], scratch=measured[-1])
    assert exact.token_bytes == props["kv_bytes_per_token"]
    assert exact.sequence_bytes == props["kv_bytes_per_sequence"]
    assert model.layout.count_by_kind() == props["layers"]
    assert model.layout.batching == props["attention"]["path"]
    assert exact.precisions[0].kv_bytes == props["kv_budget_bytes"]
    expected = forecast(model, LIMIT_BYTES, precisions=[names])
    assert expected.precisions[0].kv_bytes == pytest.approx(props["kv_budget_bytes"], rel=NEAR)


def converse(drive: Drive, num_tokens: int) -> None:
    drive.submit([i % VOCAB for i in range(num_tokens - 1)], max_tokens=2)
    drive.run()
    while drive.core.pacer.has_work:
        drive.core.pacer.run_slice(1.0)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "gemma3_text", "qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("names", [RAW, MIXED])
def test_cached_conversation_takes_the_forecast_bytes(architecture: str, names: tuple[str, str]) -> None:
    tokens, model = 1024, outline_of(architecture)
    result = forecast(model, LIMIT_BYTES, precisions=[names], lengths=[tokens])
    drive = Drive(tiny_loaded(architecture), storage=KvConfig(k=parse(names[0]), v=parse(names[1])))
    converse(drive, tokens)
    cached_bytes = drive.prefix_cache.table.nbytes
    (capacity,) = result.precisions[0].capacities
    has_checkpoints = model.layout.fixed_bytes > 0
    # One prompt leaves fewer checkpoints than a conversation may keep.
    assert cached_bytes <= 1.02 * capacity.bytes
    assert cached_bytes >= (0.98 * capacity.bytes if not has_checkpoints else tokens * result.precisions[0].token_bytes)


def test_conversation_on_the_disk_takes_the_forecast_bytes(tmp_path: Path) -> None:
    tokens, model = 2048, outline_of("llama")
    (capacity,) = forecast(model, LIMIT_BYTES, precisions=[RAW], lengths=[tokens]).precisions[0].capacities
    disk = DiskOptions(tmp_path / "kv", 256 * MIB, reserve_bytes=0)
    with started(tiny_loaded("llama"), KvConfig(), disk) as engine:
        reply = Reply()
        prompt = tuple(i % VOCAB for i in range(tokens - 1))
        engine.submit(Request("only", prompt, 2, sampling=GREEDY), reply.sink)
        reply.wait()
    on_disk = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*.safetensors"))
    assert 0.9 * capacity.disk_bytes <= on_disk <= capacity.disk_bytes


def test_advise_returns_the_most_exact_precision_that_fits() -> None:
    model = replace(outline_of("llama"), context_tokens=8192)
    result = forecast(model, 128 * MIB, lengths=[8192])
    counts = {row.name: row.capacities[0].conversations for row in result.precisions}
    assert list(counts) == ["raw", "planes:8", "planes:8/planes:4", "planes:4"]
    assert list(counts.values()) == sorted(counts.values())
    for name, count in counts.items():
        row = advise(result, tokens=8192, conversations=count)
        assert row is not None
        assert row.capacities[0].conversations >= count
        assert list(counts).index(row.name) <= list(counts).index(name)
    assert advise(result, tokens=8192, conversations=counts["planes:4"] + 1) is None
    assert advise(result, tokens=4096, conversations=1) is None  # the forecast has no such length


def test_needs_live_when_a_request_fits_only_encoded() -> None:
    model = replace(outline_of("llama"), context_tokens=1 << 20)
    result = forecast(model, 64 * MIB, precisions=[("planes:4", "planes:4")], scratch=Scratch())
    (row,) = result.precisions
    assert row.max_request_tokens < row.max_live_request_tokens
    assert needs_live(row, row.max_live_request_tokens)
    assert not needs_live(row, row.max_request_tokens)


def test_forecast_lists_an_unsupported_precision_with_the_reason() -> None:
    result = forecast(outline_of("llama"), LIMIT_BYTES, precisions=[RAW, ("affine:8:g128", "raw")])
    assert [row.name for row in result.precisions] == ["raw"]
    assert "affine:8:g128" in result.unsupported[0]


def test_forecast_of_a_model_with_foreign_caches_is_raw_only() -> None:
    result = forecast(outline_of(FOREIGN), LIMIT_BYTES)
    assert [row.name for row in result.precisions] == ["raw"]


@given(more=st.integers(0, 64), limit_mib=st.integers(8, 4096))
def test_forecast_with_more_memory_never_fits_less(more: int, limit_mib: int) -> None:
    less, rest = (forecast(LLAMA, size * MIB) for size in (limit_mib, limit_mib + more))
    for small, large in zip(less.precisions, rest.precisions, strict=True):
        assert (small.max_cached_tokens or 0) <= (large.max_cached_tokens or 0)
        assert small.capacities[0].conversations <= large.capacities[0].conversations
        assert 0 <= small.max_request_tokens <= large.max_request_tokens <= LLAMA.context_tokens
    _check_plan(less, limit_mib * MIB)


def _check_plan(result: Forecast, limit_bytes: int) -> None:
    plan = result.memory
    parts = plan.weight_bytes + plan.allocator_cache_bytes + plan.spare_bytes + plan.scratch_bytes
    assert parts + max(0, plan.kv_bytes) <= max(limit_bytes, parts)


LLAMA = outline_of("llama")


def test_expected_scratch_on_a_gpu_has_no_scores() -> None:
    on_gpu = expected_scratch(replace(LLAMA, backend="metal"), rows=16)
    on_cpu = expected_scratch(replace(LLAMA, backend="cpu"), rows=16)
    assert on_gpu.lines[0] == on_cpu.lines[0]  # logits take the same on both
    assert 0 < on_gpu.lines[2].token_bytes < on_cpu.lines[2].token_bytes  # a GPU holds no scores
