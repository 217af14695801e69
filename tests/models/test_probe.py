"""16-bit models are batched as float32 ones are, and a path that is wrong is found out in 16 bits too."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from kvstrata.kv.attention_rows import AttentionRows
from kvstrata.models import probe as probing
from kvstrata.models.probe import probe
from tests.support.models import ARCHITECTURES, steady_module

pytestmark = pytest.mark.usefixtures("as_on_metal")


def module_in(architecture: str, dtype: mx.Dtype) -> Any:
    model = steady_module(architecture)
    model.update(tree_map(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters()))
    return model


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_path_does_not_depend_on_the_dtype(architecture: str, dtype: mx.Dtype) -> None:
    wide, narrow = probe(steady_module(architecture)), probe(module_in(architecture, dtype))
    assert (narrow.batching, narrow.mixes) == (wide.batching, wide.mixes)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma3_text"])
def test_rows_at_a_wrong_position_are_found_out(
    architecture: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = AttentionRows.begin_step
    monkeypatch.setattr(AttentionRows, "begin_step", lambda self, offsets: begin(self, mx.zeros_like(offsets)))
    with caplog.at_level(logging.WARNING):
        layout = probe(module_in(architecture, dtype))
    assert layout.batching == "per_sequence"
    assert "passes of its own" in caplog.text


def test_noise_is_measured_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[Any] = []
    run_alone = probing._run_alone

    def counted(model: Any, layout: Any, cut: Any = None) -> Any:
        cuts.append(cut)
        return run_alone(model, layout, cut)

    monkeypatch.setattr(probing, "_run_alone", counted)
    probe(steady_module("llama"))
    assert cuts == [None]
