"""Dispatch of attention: `explain` names the path of each operation and the reason."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from kvstrata.attention import dispatch
from kvstrata.attention.cuda import trials as cuda_trials
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.codecs.backends import HeadKind, KernelChoice, Trial, TrialKey, VectorKind, runtime
from kvstrata.kv import decode_step
from kvstrata.kv.layout import LayerSpec, Layout
from tests.codecs.arrays import some_rotation


def heads(dtype: mx.Dtype = mx.float32, dim: int = 64) -> HeadKind:
    return HeadKind(VectorKind(dtype, dim), VectorKind(dtype, dim))


def explained(kind: HeadKind, *, joined: bool = False) -> dict[str, KernelChoice]:
    choices = dispatch.explain([kind], joined=joined)
    return {choice.operation.partition(" (")[0]: choice for choice in choices}


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (heads(), "cpu"),
        (heads(mx.bfloat16), "stock"),
        (HeadKind(heads().k, VectorKind(mx.float32, 64, some_rotation("halves", 64))), "stock"),
    ],
)
def test_explain_on_a_cpu_names_the_dtypes_that_its_kernels_take(kind: HeadKind, backend: str) -> None:
    with runtime().use_backend("cpu"):
        assert explained(kind)["decode step"].backend == backend


@pytest.mark.parametrize(("dim", "most"), [(128, 8), (256, 4)])
def test_explain_on_cuda_needs_a_trial_and_says_how_many_queries_fit(
    dim: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = heads(mx.bfloat16, dim)
    monkeypatch.setattr(runtime(), "checks", {})
    with runtime().use_backend("cuda"):
        assert explained(kind)["decode step"].backend == "stock"
        runtime().checks[cuda_trials.step_works, mx.bfloat16, dim, dim] = True
        step = explained(kind)["decode step"]
    assert (step.backend, f"up to {most} queries" in step.reason) == ("cuda", True)


def test_explain_on_metal_has_a_row_for_each_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    key = metal_trials.DecodeKind(mx.bfloat16, 64, 64, 2)
    trials = {
        TrialKey("raw", key): Trial("raw", 0.0, 1.0, 2.0, 1.0),
        TrialKey("planes", key): Trial("planes", 0.0, 1.0, 1.0, 2.0),
    }
    monkeypatch.setattr(runtime(), "trials", trials)
    with runtime().use_backend("metal"):
        found = explained(heads(mx.bfloat16))
    assert found["decode step over raw"].backend == "stock"
    assert found["decode step over planes"].backend == "metal"


def test_explain_of_a_layout_leaves_out_paths_that_the_model_does_not_take() -> None:
    spec = LayerSpec("full", kv_heads=2, k_dim=64, v_dim=64)
    other = replace(spec, k_rotation=some_rotation("halves", 64))
    batched = decode_step.explain(Layout((spec, spec, other), "batched"))
    assert len(set(batched)) == len(batched)
    assert {choice.operation.partition(" (")[2] for choice in batched[1:]} == {
        "heads of 64, float32)",
        "heads of 64, float32, RoPE-aware means)",
    }
    alone = decode_step.explain(Layout((spec,), "per_sequence", reason="rows differ"))
    assert "rows differ" in alone[0].reason
    assert [choice.operation.partition(" (")[0] for choice in alone[1:3]] == [
        "decode step and prefill",
        "segments to arrays",
    ]
    assert not any(choice.operation.startswith(("scores", "mix")) for choice in alone)
