"""Form of weights on a CPU: the choice, and its part in the identity of a model."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from kvstrata.errors import ModelError
from kvstrata.models.cpu_form import choose_form, weights_here
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.fingerprint import fingerprint
from kvstrata.packed.form import DENSE, CpuForm
from kvstrata.packed.place import placed_bytes
from tests.packed.models import EXACT, ROUNDED, quantized_model
from tests.tiny import tiny_module


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
    assert weights_here().startswith("become float32")
    with pytest.raises(ModelError, match=r"kvstrata\[cpu\]"):
        choose_form(model, CpuOptions("8"), 1 << 40)


def test_fingerprint_differs_by_form(tmp_path: Path) -> None:
    """Blocks on disk of another form must not be hits."""
    (tmp_path / "config.json").write_text("{}")
    forms = [DENSE, EXACT, ROUNDED, *(CpuForm(packs=True, plain_bits=bits, activations=16) for bits in (8, 4))]
    assert len({fingerprint(tmp_path, form=form.identity) for form in forms}) == len(forms)
    assert fingerprint(tmp_path, form=DENSE.identity) == fingerprint(tmp_path)
