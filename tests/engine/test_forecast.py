"""What is told of a model before it is loaded is what an engine has then: bytes, budgets, stored conversations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.backend import mlx_backend
from kvstrata.codecs.registry import parse
from kvstrata.disk.options import DiskOptions
from kvstrata.engine import thread
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.memory_plan import Forecast, Scratch, advise, expected_scratch, forecast, needs_live
from kvstrata.engine.request import Request
from kvstrata.layers.kinds import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import load
from kvstrata.models.loaded import LoadedModel
from kvstrata.models.outline import Outline, outline, outline_layers
from tests.engine.drive import GREEDY, Drive
from tests.engine.test_engine import Reply
from tests.models.conftest import write_model
from tests.tiny import ARCHITECTURES, FOREIGN, VOCAB, tiny_config, tiny_loaded, tiny_module

MIB = 1 << 20
LIMIT_BYTES = 1024 * MIB
BACKEND = mlx_backend()
# Of the budget for KV: how far what is expected may be from what is measured.
NEAR = 0.1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Scratch]:
    """The scratch of every engine that is started."""
    seen: list[Scratch] = []
    measure = thread.remembered_scratch

    def remembered(*args: object) -> Scratch:
        seen.append(measure(*args))  # pyright: ignore[reportArgumentType]
        return seen[-1]

    monkeypatch.setattr(thread, "remembered_scratch", remembered)
    return seen


@contextmanager
def started(loaded: LoadedModel, storage: KvConfig, disk: DiskOptions | None = None) -> Iterator[Engine]:
    mx.eval(arrays_in(loaded.module))  # what is lazy belongs to this thread
    engine = Engine(loaded, EngineLimits(memory_bytes=LIMIT_BYTES), Metrics(), storage, disk)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def outline_of(architecture: str) -> Outline:
    """Without a folder: of the module that tests run."""
    layout, logits = outline_layers(tiny_module(architecture), is_mla=architecture.startswith("deepseek"))
    loaded = tiny_loaded(architecture)
    return Outline(
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
def test_a_plan_agrees_with_the_engine(
    tmp_path: Path, architecture: str, names: tuple[str, str], measured: list[Scratch]
) -> None:
    folder = write_model(tmp_path / architecture, tiny_module(architecture), tiny_config(architecture))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = outline(str(folder), BACKEND, limit_bytes=LIMIT_BYTES)
    assert mx.get_peak_memory() - before < 1 << 16  # nothing was read or computed

    loaded = load(str(folder), memory_limit_bytes=LIMIT_BYTES)
    assert found.weight_bytes == loaded.weight_bytes
    assert (found.context_tokens, found.vocab_size) == (loaded.context_tokens, loaded.vocab_size)
    with started(loaded, KvConfig(k=parse(names[0]), v=parse(names[1]))) as engine:
        props = engine.props()
    exact = forecast(found, LIMIT_BYTES, precisions=[names], scratch=measured[-1])
    assert exact.token_bytes == props["kv_bytes_per_token"]
    assert exact.sequence_bytes == props["kv_bytes_per_sequence"]
    assert found.layout.count_by_kind() == props["layers"]
    assert found.layout.path == props["attention"]["path"]
    assert exact.precisions[0].kv_bytes == props["kv_budget_bytes"]
    expected = forecast(found, LIMIT_BYTES, precisions=[names])
    assert expected.precisions[0].kv_bytes == pytest.approx(props["kv_budget_bytes"], rel=NEAR)


def converse(drive: Drive, num_tokens: int) -> None:
    drive.submit([i % VOCAB for i in range(num_tokens - 1)], max_tokens=2)
    drive.run()
    while drive.core.pacer.has_work:
        drive.core.pacer.run_slice(1.0)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "gemma3_text", "qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("names", [RAW, MIXED])
def test_a_stored_conversation_takes_what_was_told(architecture: str, names: tuple[str, str]) -> None:
    tokens, found = 1024, outline_of(architecture)
    told = forecast(found, LIMIT_BYTES, precisions=[names], lengths=[tokens])
    drive = Drive(tiny_loaded(architecture), storage=KvConfig(k=parse(names[0]), v=parse(names[1])))
    converse(drive, tokens)
    held = drive.prefix_cache.table.nbytes
    (stored,) = told.precisions[0].capacities
    marks = found.layout.fixed_bytes > 0
    # One prompt leaves fewer points to resume at than a conversation may keep.
    assert held <= 1.02 * stored.bytes
    assert held >= (0.98 * stored.bytes if not marks else tokens * told.precisions[0].token_bytes)


def test_a_conversation_on_the_disk_takes_what_was_told(tmp_path: Path) -> None:
    tokens, found = 2048, outline_of("llama")
    (stored,) = forecast(found, LIMIT_BYTES, precisions=[RAW], lengths=[tokens]).precisions[0].capacities
    disk = DiskOptions(tmp_path / "kv", 256 * MIB, reserve_bytes=0)
    with started(tiny_loaded("llama"), KvConfig(), disk) as engine:
        reply = Reply()
        prompt = tuple(i % VOCAB for i in range(tokens - 1))
        engine.submit(Request("only", prompt, 2, sampling=GREEDY), reply.sink)
        reply.wait()
    on_disk = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*.safetensors"))
    assert 0.9 * stored.disk_bytes <= on_disk <= stored.disk_bytes


def test_the_advice_is_the_most_exact_row_that_holds_what_is_wanted() -> None:
    found = replace(outline_of("llama"), context_tokens=8192)
    told = forecast(found, 128 * MIB, lengths=[8192])
    counts = {row.name: row.capacities[0].conversations for row in told.precisions}
    assert list(counts) == ["raw", "planes:8", "planes:8/planes:4", "planes:4"]
    assert list(counts.values()) == sorted(counts.values())
    for name, count in counts.items():
        row = advise(told, tokens=8192, conversations=count)
        assert row is not None
        assert row.capacities[0].conversations >= count
        assert list(counts).index(row.name) <= list(counts).index(name)
    assert advise(told, tokens=8192, conversations=counts["planes:4"] + 1) is None
    assert advise(told, tokens=4096, conversations=1) is None  # that length was not asked for


def test_a_request_that_fits_only_when_it_is_encoded_asks_for_live() -> None:
    found = replace(outline_of("llama"), context_tokens=1 << 20)
    told = forecast(found, 64 * MIB, precisions=[("planes:4", "planes:4")], scratch=Scratch())
    (row,) = told.precisions
    assert row.max_request_tokens < row.max_live_request_tokens
    assert needs_live(row, row.max_live_request_tokens)
    assert not needs_live(row, row.max_request_tokens)


def test_a_precision_that_the_layers_cannot_have_is_left_out_with_the_reason() -> None:
    told = forecast(outline_of("llama"), LIMIT_BYTES, precisions=[RAW, ("affine:8:g128", "raw")])
    assert [row.name for row in told.precisions] == ["raw"]
    assert "affine:8:g128" in told.unsupported[0]


def test_a_model_with_caches_of_its_own_is_kept_as_it_is() -> None:
    told = forecast(outline_of(FOREIGN), LIMIT_BYTES)
    assert [row.name for row in told.precisions] == ["raw"]


@given(more=st.integers(0, 64), limit_mib=st.integers(8, 4096))
def test_more_memory_never_holds_less(more: int, limit_mib: int) -> None:
    less, rest = (forecast(LLAMA, size * MIB) for size in (limit_mib, limit_mib + more))
    for small, large in zip(less.precisions, rest.precisions, strict=True):
        assert (small.max_cached_tokens or 0) <= (large.max_cached_tokens or 0)
        assert small.capacities[0].conversations <= large.capacities[0].conversations
        assert 0 <= small.max_request_tokens <= large.max_request_tokens <= LLAMA.context_tokens
    _check_shares(less, limit_mib * MIB)


def _check_shares(told: Forecast, limit_bytes: int) -> None:
    shares = told.memory
    parts = shares.weight_bytes + shares.allocator_cache_bytes + shares.spare_bytes + shares.scratch_bytes
    assert parts + max(0, shares.kv_bytes) <= max(limit_bytes, parts)


LLAMA = outline_of("llama")


def test_scratch_is_expected_for_gpus_too() -> None:
    on_gpu = expected_scratch(replace(LLAMA, backend="metal"), rows=16)
    on_cpu = expected_scratch(replace(LLAMA, backend="cpu"), rows=16)
    assert on_gpu.lines[0] == on_cpu.lines[0]  # logits are logits
    assert 0 < on_gpu.lines[2].token_bytes < on_cpu.lines[2].token_bytes  # scores are never held there
