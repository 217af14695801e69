"""Dispatch of codec operations: `explain` names the paths that operations take."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.codecs import dispatch, trials
from kvstrata.codecs.backends import NOT_TRIED, Backend, HeadKind, KernelChoice, Trial, TrialKey, VectorKind, runtime
from kvstrata.codecs.cpu import planes as cpu_planes
from kvstrata.codecs.cuda import planes as cuda_planes
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.kernel_text import KernelLaunch
from kvstrata.codecs.planes import PlanesCodec
from tests.codecs.arrays import keys, some_rotation

KIND = VectorKind(mx.float32, 64)


def explained(kind: VectorKind) -> dict[str, KernelChoice]:
    """Return the choices for keys and values of one kind, by the operations' names."""
    return {choice.operation.partition(" (")[0]: choice for choice in dispatch.explain([HeadKind(kind, kind)])}


def paths(kind: VectorKind) -> dict[str, str]:
    return {operation: choice.backend for operation, choice in explained(kind).items()}


def reason(operation: str, kind: VectorKind) -> str:
    return explained(kind)[operation].reason


def fails(_: KernelLaunch) -> list[mx.array]:
    raise AssertionError("nothing is launched")


@pytest.mark.parametrize(
    ("backend", "coding", "products"),
    [("cpu", "cpu", "cpu"), ("cuda", "cuda", "cuda"), ("metal", "stock", "stock"), ("plain", "stock", "stock")],
)
def test_explain_names_the_backend_of_each_operation(backend: Backend, coding: str, products: str) -> None:
    coded = {f"{operation} {what}": coding for operation in ("encode", "decode") for what in ("keys", "values")}
    wanted = {**coded, "scores": products, "mix": products}
    with runtime().use_backend(backend):
        assert paths(KIND) == wanted
        rotated = KIND._replace(rotation=some_rotation("halves", 64))
        assert paths(rotated) == {**wanted, "mix": "stock"}


def test_explain_reports_trials_without_running_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "dialect", lambda: "metal")
    monkeypatch.setattr(runtime(), "trials", {})
    with runtime().use_backend("metal"):
        assert reason("encode keys", KIND) == NOT_TRIED
        assert reason("encode keys", KIND._replace(dim=72)) == "the kernel does not take vectors of this kind"
        runtime().trials[TrialKey("encode", KIND)] = Trial("encode", 0.0, 1.0, 1.0, 2.0)
        runtime().trials[TrialKey("decode", KIND)] = Trial("decode", 0.0, 1.0, 2.0, 1.0)
        assert (paths(KIND)["encode keys"], paths(KIND)["decode values"]) == ("metal", "stock")
        assert "own (1 ms" in reason("encode keys", KIND)
        assert dispatch.join_path(KIND) == ("stock", NOT_TRIED)
    with trials.as_if_tried("plain", fails), runtime().use_backend("metal"):
        assert list(paths(KIND).values()) == ["metal", "metal", "stock", "metal", "metal", "stock"]
        assert dispatch.join_path(KIND)[0] == "metal"


def test_explain_reports_heads_whose_values_are_shorter() -> None:
    choices = dispatch.explain([HeadKind(KIND, KIND._replace(dim=32))])
    assert {choice.operation.partition(" (")[2] for choice in choices} == {"heads of 64 and 32, float32)"}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("num_queries", [1, 16, 17])
def test_operations_call_the_native_module_of_the_backend(
    backend: Backend, num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"cpu": cpu_planes, "cuda": cuda_planes}[backend]
    codec, called = PlanesCodec(8), []
    x, p = keys(2, 20, 64), mx.ones((2, num_queries, 20))
    with runtime().use_backend("plain"):
        encoded = codec.encode(x)
        decoded = codec.decode_stock(encoded)
    results = {
        "encode_planes": dict(encoded.arrays),
        "decode_planes": decoded,
        "score_planes": mx.zeros((2, num_queries, 20)),
        "mix_planes": mx.zeros((2, num_queries, 64)),
    }
    for name, result in results.items():
        monkeypatch.setattr(module, name, lambda *_, name=name, result=result: called.append(name) or result)
    with runtime().use_backend(backend):
        codec.encode(x)
        codec.scores(keys(2, num_queries, 64), encoded)
        codec.mix(p, encoded)
    product = ["score_planes", "mix_planes"] if num_queries <= 16 else ["decode_planes"] * 2
    assert called == ["encode_planes", *product]


def test_planes_are_made_by_stock_operations_when_no_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cpu_planes, cuda_planes):
        monkeypatch.setattr(module, "encode_planes", fails)
        monkeypatch.setattr(module, "decode_planes", fails)
    monkeypatch.setattr(metal_planes, "encode", fails)
    codec, x = PlanesCodec(8), keys(2, 20, 64)
    for backend in ("plain", "metal"):
        with runtime().use_backend(backend):
            assert float(mx.max(mx.abs(codec.decode(codec.encode(x), mx.float32) - x))) < 0.2
