"""Placement of weights: the form that they take on a CPU, and models that do not fit."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from kvstrata.errors import ModelError
from kvstrata.kv.layout import arrays_in
from kvstrata.models import placement
from kvstrata.models.cpu_options import DEFAULT, CpuOptions
from kvstrata.models.fingerprint import fingerprint
from kvstrata.models.load import load
from kvstrata.models.placement import choose_form, describe_cpu_weights, weight_bytes_in_memory
from kvstrata.packed.form import DENSE, CpuForm
from kvstrata.packed.place import placed_bytes
from tests.models.conftest import QUANTIZATION, quantized_module, write_model, write_tokenizer
from tests.packed.models import EXACT, ROUNDED, quantized_model
from tests.support.models import tiny_config, tiny_module


def test_choose_form_follows_dtype_and_options() -> None:
    quantized, sixteen, plain = quantized_model("llama"), tiny_module("llama"), tiny_module("llama")
    sixteen.set_dtype(mx.bfloat16)
    plenty = 1 << 40
    assert choose_form(quantized, CpuOptions(), plenty) == ROUNDED
    assert choose_form(plain, CpuOptions(), plenty) == DENSE
    assert choose_form(sixteen, CpuOptions(), plenty).plain_bits == 8
    assert choose_form(sixteen, CpuOptions("4"), plenty).plain_bits == 4
    assert choose_form(sixteen, CpuOptions("raw"), plenty) == DENSE
    assert choose_form(quantized, CpuOptions(activations=8), plenty).activations == 8


def test_choose_form_keeps_plain_layers_of_quantized_models() -> None:
    """Such as routers: they are few, have 16 bits, and were left plain on purpose."""
    model = tiny_module("qwen3_moe")
    nn.quantize(model, group_size=32, bits=4, class_predicate=_fits)
    model.set_dtype(mx.bfloat16)
    assert choose_form(model, CpuOptions(), 1 << 40) == ROUNDED


def _fits(name: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0 and not name.endswith("mlp.gate")


def test_choose_form_takes_four_bits_when_eight_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    sixteen = tiny_module("llama")
    sixteen.set_dtype(mx.bfloat16)
    eight, four = (placed_bytes(sixteen, CpuForm(packs=True, plain_bits=bits, activations=16)) for bits in (8, 4))
    assert four < eight
    logging.getLogger("kvstrata").propagate = True
    assert choose_form(sixteen, CpuOptions(), four).plain_bits == 4
    assert "quantized to 4" in caplog.text
    # Neither fits: the memory check refuses the model, with the size of the preferred form.
    assert choose_form(sixteen, CpuOptions(), 0).plain_bits == 8


def test_choose_form_without_numba_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    model = quantized_model("llama")
    assert choose_form(model, CpuOptions(), 1 << 40) == DENSE
    assert describe_cpu_weights().startswith("become float32")
    with pytest.raises(ModelError, match=r"kvstrata\[cpu\]"):
        choose_form(model, CpuOptions("8"), 1 << 40)


def test_fingerprint_differs_by_form(tmp_path: Path) -> None:
    """Blocks on disk of another form must not be hits."""
    (tmp_path / "config.json").write_text("{}")
    forms = [DENSE, EXACT, ROUNDED, *(CpuForm(packs=True, plain_bits=bits, activations=16) for bits in (8, 4))]
    assert len({fingerprint(tmp_path, form=form.identity) for form in forms}) == len(forms)
    assert fingerprint(tmp_path, form=DENSE.identity) == fingerprint(tmp_path)


on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="weights become float32 on the CPU back-end only")

RAW = CpuOptions("raw")
CODED = CpuForm(packs=True, plain_bits=None, activations=16)
GIB = 1 << 30
# Of 8B parameters, as mlx-lm writes them in 4 bits.
HIDDEN, INNER, VOCAB, KV, LAYERS, GROUP = 4096, 14336, 128_256, 1024, 32, 64

EIGHT_B = {
    **tiny_config("llama"),
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "quantization": {"group_size": GROUP, "bits": 4},
}

NUM_VALUES = 2 * VOCAB * HIDDEN + LAYERS * HIDDEN * (2 * HIDDEN + 2 * KV + 3 * INNER)


def _packed(name: str, rows: int, columns: int) -> dict[str, tuple[str, list[int]]]:
    return {
        f"{name}.weight": ("U32", [rows, columns // 8]),
        f"{name}.scales": ("BF16", [rows, columns // GROUP]),
        f"{name}.biases": ("BF16", [rows, columns // GROUP]),
    }


def _eight_b_tensors() -> dict[str, tuple[str, list[int]]]:
    tensors = {"model.norm.weight": ("BF16", [HIDDEN])}
    tensors |= _packed("model.embed_tokens", VOCAB, HIDDEN) | _packed("lm_head", VOCAB, HIDDEN)
    shapes = {"self_attn.q": (HIDDEN, HIDDEN), "self_attn.k": (KV, HIDDEN), "self_attn.v": (KV, HIDDEN)}
    shapes |= {"self_attn.o": (HIDDEN, HIDDEN)}
    shapes |= {"mlp.gate": (INNER, HIDDEN), "mlp.up": (INNER, HIDDEN), "mlp.down": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            tensors |= _packed(f"{prefix}.{name}_proj", rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ("BF16", [HIDDEN])
    return tensors


@pytest.fixture
def eight_b(tmp_path: Path) -> Path:
    folder = tmp_path / "eight-b"
    folder.mkdir()
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in _eight_b_tensors().items():
        start, end = end, end + math.prod(shape) * {"U32": 4, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(EIGHT_B))
    write_tokenizer(folder)
    return folder


@on_cpu
def test_a_model_that_would_get_the_process_killed_is_refused_with_both_numbers(
    eight_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "free_memory_bytes", lambda: 12 * GIB)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with pytest.raises(
        ModelError, match=r"take 29\.\d+GiB .*\(4\.\d+GiB on the disk; on this CPU.*float32\).* 12GiB are free"
    ):
        load(str(eight_b), cpu=RAW)
    assert mx.get_peak_memory() - before < 1 << 20  # nothing was read


@on_cpu
def test_a_model_beyond_the_memory_limit_is_refused_with_both_numbers(
    eight_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "free_memory_bytes", lambda: 100 * GIB)
    with pytest.raises(ModelError, match=r"take 29\.\d+GiB .* the memory limit is 20GiB. Raise --memory-limit"):
        load(str(eight_b), memory_limit_bytes=20 * GIB, cpu=RAW)


@on_cpu
def test_what_is_told_beforehand_is_every_value_in_float32(eight_b: Path) -> None:
    from mlx_lm.utils import load_model

    module, _ = load_model(eight_b, lazy=True)
    norms = (2 * LAYERS + 1) * HIDDEN
    assert weight_bytes_in_memory(module, DENSE) == 4 * (NUM_VALUES + norms)


@on_cpu
def test_packed_weights_take_what_the_file_takes(eight_b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.utils import load_model

    module, _ = load_model(eight_b, lazy=True)
    norms = (2 * LAYERS + 1) * HIDDEN
    # 4 bits, and a scale and a bias of 16 for each group.
    assert weight_bytes_in_memory(module, CODED) == NUM_VALUES * (4 + 2 * 16 / GROUP) / 8 + 4 * norms
    monkeypatch.setattr(placement, "free_memory_bytes", lambda: 3 * GIB)
    with pytest.raises(ModelError, match=r"take 4\.\d+GiB .*packed.* 3GiB are free"):
        load(str(eight_b))


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_what_is_told_beforehand_is_what_is_allocated(tmp_path: Path, architecture: str) -> None:
    from mlx_lm.utils import load_model

    config = {**tiny_config(architecture), "quantization": QUANTIZATION}
    folder = write_model(tmp_path / architecture, quantized_module(architecture), config)
    module, _ = load_model(folder, lazy=True)
    for form, options in ((DENSE, RAW), (CODED, DEFAULT)) if mx.default_device() == mx.cpu else ((None, DEFAULT),):
        assert weight_bytes_in_memory(module, form) == load(str(folder), cpu=options).weight_bytes


def test_weights_of_16_bits_are_told_as_they_will_be(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    half = tiny_module("llama")
    half.set_dtype(mx.bfloat16)
    folder = write_model(tmp_path / "half", half, tiny_config("llama"))
    module, _ = load_model(folder, lazy=True)
    eight = CpuForm(packs=True, plain_bits=8, activations=16)
    for form, options in ((DENSE, RAW), (eight, DEFAULT)) if mx.default_device() == mx.cpu else ((None, DEFAULT),):
        loaded = load(str(folder), cpu=options)
        assert weight_bytes_in_memory(module, form) == sum(
            array.nbytes for array in arrays_in(loaded.module.parameters())
        )
