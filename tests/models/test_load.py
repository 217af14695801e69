"""Loading real folders of tiny models: what comes out, and what a damaged one is answered."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from kvstrata.errors import ModelError
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.load import UNLIMITED_CONTEXT_TOKENS, context_tokens, load
from tests.models.conftest import QUANTIZATION, quantized_module, write_model
from tests.support.models import VOCAB, tiny_config, tiny_module

RAW = CpuOptions("raw")
on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="weights become float32 on the CPU back-end only")

IDS = mx.array([[5, 9, 2, 40, 77]])


def test_a_folder_is_loaded_and_described(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder))
    assert (loaded.name, loaded.path) == ("tiny", tiny_folder.resolve())
    assert loaded.context_tokens == 8192
    assert loaded.vocab_size == VOCAB
    assert loaded.eos_ids == frozenset({0})
    assert loaded.dtype == "float32"
    assert loaded.config["model_type"] == "llama"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("a b")) == "a b"
    assert mx.array_equal(loaded.module(IDS), tiny_module("llama")(IDS))


def test_weight_bytes_are_what_mlx_allocated(tmp_path: Path) -> None:
    config = {**tiny_config("llama"), "vocab_size": 20_000}
    from mlx_lm.models.llama import Model, ModelArgs

    folder = write_model(tmp_path / "wide", Model(ModelArgs.from_dict(config)), config)
    mx.clear_cache()
    before = mx.get_active_memory()
    loaded = load(str(folder))
    assert mx.get_active_memory() - before == pytest.approx(loaded.weight_bytes, rel=0.02)


@on_cpu
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bit_weights_become_float32(tmp_path: Path, dtype: mx.Dtype) -> None:
    module = tiny_module("llama")
    module.set_dtype(dtype)
    loaded = load(str(write_model(tmp_path / "half", module, tiny_config("llama"))), cpu=RAW)
    parameters: Any = tree_flatten(loaded.module.parameters())
    assert {array.dtype for _, array in parameters} == {mx.float32}
    assert loaded.module(IDS).dtype == mx.float32


@on_cpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_quantized_weights_become_float32_and_say_the_same(tmp_path: Path, architecture: str) -> None:
    module = quantized_module(architecture)
    config = {**tiny_config(architecture), "quantization": QUANTIZATION}
    loaded = load(str(write_model(tmp_path / architecture, module, config)), cpu=RAW)
    assert not [name for name, part in loaded.module.named_modules() if "scales" in part]
    assert loaded.dtype == "float32"
    assert mx.allclose(loaded.module(IDS), module(IDS), rtol=0, atol=1e-4)


@on_cpu
def test_quantized_heads_of_latent_attention_become_float32(tmp_path: Path) -> None:
    from mlx_lm.models.deepseek_v3 import Model, ModelArgs
    from mlx_lm.models.mla import QuantizedMultiLinear

    config = {**tiny_config("deepseek_v3"), "qk_nope_head_dim": 32}
    module = Model(ModelArgs.from_dict(config))
    nn.quantize(module, group_size=32, bits=4, class_predicate=lambda _, part: hasattr(part, "to_quantized"))
    assert any(isinstance(part, QuantizedMultiLinear) for _, part in module.named_modules())
    loaded = load(str(write_model(tmp_path / "mla", module, {**config, "quantization": QUANTIZATION})), cpu=RAW)
    assert not [name for name, part in loaded.module.named_modules() if "scales" in part]
    assert mx.allclose(loaded.module(IDS), module(IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 1024}}, 1024),
        ({"n_positions": 2048}, 2048),
        ({"max_position_embeddings": None, "text_config": None}, UNLIMITED_CONTEXT_TOKENS),
    ],
)
def test_context_comes_from_the_config(config: dict[str, Any], expected: int) -> None:
    assert context_tokens(config) == expected


def write_adapter(folder: Path, kind: str = "lora") -> Path:
    """An adapter whose second matrix is not zero, so that it must change the output."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    settings = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    module = tiny_module("llama")
    module.freeze()
    linear_to_lora_layers(module, 2, settings, use_dora=kind == "dora")
    trained: Any = dict(tree_flatten(module.trainable_parameters()))
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), {k: mx.full(v.shape, 0.1) for k, v in trained.items()})
    described = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def test_an_adapter_changes_output_and_identity(tiny_folder: Path, tmp_path: Path) -> None:
    plain = load(str(tiny_folder))
    adapted = load(str(tiny_folder), adapter=write_adapter(tmp_path / "adapter"))
    assert not mx.allclose(adapted.module(IDS), plain.module(IDS), rtol=0, atol=1e-3)
    assert adapted.fingerprint != plain.fingerprint


@on_cpu
def test_an_adapter_on_quantized_weights_becomes_float32(tmp_path: Path) -> None:
    config = {**tiny_config("llama"), "quantization": QUANTIZATION}
    folder = write_model(tmp_path / "packed", quantized_module("llama"), config)
    adapted = load(str(folder), adapter=write_adapter(tmp_path / "adapter"), cpu=RAW)
    assert not [name for name, part in adapted.module.named_modules() if "scales" in part]
    assert not mx.allclose(adapted.module(IDS), load(str(folder)).module(IDS), rtol=0, atol=1e-3)
    packed = load(str(folder), adapter=tmp_path / "adapter")
    assert mx.allclose(packed.module(IDS), adapted.module(IDS), rtol=0, atol=1e-3)


@on_cpu
def test_an_adapter_that_reads_the_weights_itself_has_them_as_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**tiny_config("llama"), "quantization": QUANTIZATION}
    folder = write_model(tmp_path / "packed", quantized_module("llama"), config)
    adapter = write_adapter(tmp_path / "adapter", "dora")
    logging.getLogger("kvstrata").propagate = True
    adapted, raw = load(str(folder), adapter=adapter), load(str(folder), adapter=adapter, cpu=RAW)
    assert "does not run with packed weights" in caplog.text
    assert (adapted.weights, adapted.fingerprint) == (raw.weights, raw.fingerprint)
    assert mx.allclose(adapted.module(IDS), raw.module(IDS), rtol=0, atol=1e-5)


def test_a_missing_adapter_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        load(str(tiny_folder), adapter=tmp_path / "none")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def spoil_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"}" + content[9:])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def absurd_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def drop_tensor(folder: Path) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights.pop("model.layers.1.mlp.up_proj.weight")
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def name_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def spoil_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "bytes where"),
        (spoil_header, "header"),
        (empty_weights, "no safetensors header"),
        (absurd_header, "no safetensors header"),
        (drop_tensor, "do not fit its config.json"),
        (name_missing_shard, "model-00002-of-00002.safetensors"),
        (drop_weights, "no model\\*.safetensors"),
        (drop_config, "no config.json"),
        (spoil_config, "config.json is damaged"),
        (lambda folder: change_config(folder, model_type="unheard_of"), "unheard_of"),
        (lambda folder: change_config(folder, model_type=None), "names no model_type"),
        (lambda folder: change_config(folder, hidden_size=128), "could not load|do not fit"),
        (lambda folder: change_config(folder, model_file="own.py"), "never runs"),
        (drop_tokenizer, "no tokenizer"),
        (spoil_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_folder_is_a_clear_error(tiny_folder: Path, damage: Any, says: str) -> None:
    damage(tiny_folder)
    with pytest.raises(ModelError, match=says) as raised:
        load(str(tiny_folder))
    assert str(tiny_folder.resolve()) in str(raised.value)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nothing", "no-such-folder", "a/b/c"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="There is no model folder"):
        load(name)


def test_a_hub_model_that_is_not_here_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The library reads its environment once, at import.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        load("kvstrata/none-such")
