"""A model's outline: the same numbers as those of the loaded model, and nothing read, converted or downloaded."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from kvstrata.errors import ModelError
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.load import load
from kvstrata.models.outline import outline
from kvstrata.models.probe import probe
from kvstrata.platform.device import mlx_backend
from tests.models.conftest import QUANTIZATION, quantized_module, write_model
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf import a_model
from tests.models.test_placement import KV, LAYERS, NUM_VALUES, eight_b  # noqa: F401
from tests.support.models import tiny_config, tiny_module

BACKEND = mlx_backend()


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_gguf_file_is_outlined_without_converting_it(
    architecture: str, kind: str, cache_home: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture, *a_model(architecture), kind=kind)
    told = outline(str(path), BACKEND)
    assert not cache_home.exists()
    loaded = load(str(path))
    assert told.name == "tiny"
    assert told.weight_bytes == loaded.weight_bytes
    layout = probe(loaded.module)
    assert [spec.signature for spec in told.layout.flat()] == [spec.signature for spec in layout.flat()]
    assert (told.context_tokens, told.vocab_size) == (loaded.context_tokens, loaded.vocab_size)
    assert outline(str(path), BACKEND).weight_bytes == told.weight_bytes  # now it is converted


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_quantized_weights_are_told_as_they_will_lie(architecture: str, tmp_path: Path) -> None:
    config = {**tiny_config(architecture), "quantization": QUANTIZATION}
    folder = str(write_model(tmp_path / architecture, quantized_module(architecture), config))
    for cpu in (CpuOptions(), CpuOptions("raw")):
        assert outline(folder, BACKEND, cpu=cpu).weight_bytes == load(folder, cpu=cpu).weight_bytes


def test_another_machine_keeps_16_bits(tmp_path: Path) -> None:
    half = tiny_module("llama")
    half.set_dtype(mx.bfloat16)
    folder = str(write_model(tmp_path / "half", half, tiny_config("llama")))
    on_cpu, on_mac = outline(folder, "cpu"), outline(folder, "metal")
    assert (on_cpu.dtype, on_mac.dtype) == ("float32", "bfloat16")
    assert on_cpu.layout.token_bytes == 2 * on_mac.layout.token_bytes
    assert on_mac.weights == ""


def test_a_large_model_is_outlined_in_no_memory(eight_b: Path) -> None:  # noqa: F811
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    told = outline(str(eight_b), "metal")
    assert mx.get_peak_memory() - before < 1 << 20
    assert told.layout.token_bytes == 2 * KV * 2 * LAYERS
    assert told.weight_bytes == pytest.approx(NUM_VALUES * 4.5 / 8, rel=0.001)
    assert told.dtype == "bfloat16"


def test_what_is_not_here_is_an_error_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match=r"not on this machine. Next: kvstrata pull some/model"):
        outline("some/model", BACKEND)
    with pytest.raises(ModelError, match=r"not on this machine. Next: kvstrata pull$"):
        outline(None, BACKEND)
    with pytest.raises(ModelError, match="no model folder"):
        outline("./nowhere", BACKEND)
    with pytest.raises(ModelError, match="no file"):
        outline(str(tmp_path / "no.gguf"), BACKEND)
