"""CUDA kernels that we compile: their parameters, and the trial before the first of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.codecs.backends import runtime
from kvstrata.codecs.cuda import compile as cuda_compile
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda import planes as cuda_planes
from kvstrata.codecs.cuda.compile import ArrayArgument, SizeArgument, text_of
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.platform import cuda_compiler
from tests.attention import cuda_emulated
from tests.codecs.arrays import keys

needs_emulation = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not cuda_emulated.works(), reason="needs Linux and a C++ compiler, and no GPU"
)


HEADER = cuda_kernels.without_comments(cuda_kernels.FOLDER / "intrinsics.cuh")


@pytest.fixture
def untried() -> Iterator[None]:
    runtime().checks.clear()
    yield
    runtime().checks.clear()


def test_sizes_are_parameters_after_the_arrays() -> None:
    source = "  y[0] = b_shape[1] + a_b_shape[0] * b_shape[0] + b_shape[1];"
    inputs = [ArrayArgument("b", mx.float16), ArrayArgument("a_b", mx.uint64)]
    name, text, *_, sizes = text_of("sum", "// before\n", source, inputs, [ArrayArgument("y", mx.int32)])
    assert sizes == (SizeArgument(0, 1), SizeArgument(1, 0), SizeArgument(0, 0))
    assert "y[0] = b_size1 + a_b_size0 * b_size0 + b_size1;" in text
    arrays, sizes = "const __half* b, const unsigned long long* a_b, int* y", ("b_size1", "a_b_size0", "b_size0")
    parameters = ", ".join([arrays, *(f"const int {number}" for number in (*sizes, "is_launch"))])
    line = f'extern "C" __global__ void {name}({parameters}) {{'
    assert f"// before\n\n{line}\n  if (!is_launch) return;\n" in text
    assert name.startswith("kvstrata_sum_")


def test_no_two_kernels_have_the_same_name() -> None:
    """MLX knows them by their names alone."""
    y, half, single = [ArrayArgument("y", mx.int32)], [ArrayArgument("x", mx.float16)], [ArrayArgument("x", mx.float32)]
    texts = [
        *(text_of("one", "", "y[0] = 1;", inputs, y) for inputs in (half, single)),
        text_of("one", "", "y[0] = 2;", half, y),
        text_of("one", "#define ONE 1\n", "y[0] = 1;", half, y),
    ]
    assert len({text.name for text in texts}) == len(texts)


@needs_emulation
@pytest.mark.usefixtures("untried")
def test_the_trial_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_emulated.install(monkeypatch)
    assert cuda_compile.works(HEADER)


@needs_emulation
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("sizes in another order", "wrong numbers"),
        ("views as they are", "wrong numbers"),
        ("machine code asked for at each call", "no machine code"),
    ],
)
def test_the_trial_notices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, complaint: str
) -> None:
    cuda_emulated.install(monkeypatch)
    run: Any = mx.fast.precompiled_cuda_kernel

    def differently(compiled_source: bytes, **launch: Any) -> list[mx.array]:
        if fault == "sizes in another order":
            launch["scalars"] = launch["scalars"][::-1]
        elif fault == "views as they are":
            launch["ensure_row_contiguous"] = False
        elif not compiled_source:
            raise RuntimeError("no machine code")
        return run(compiled_source=compiled_source, **launch)

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", differently)
    assert not cuda_compile.works(HEADER)
    assert complaint in caplog.text


@needs_emulation
def test_machine_code_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_emulated.install(monkeypatch)
    run: Any = mx.fast.precompiled_cuda_kernel
    given: list[int] = []

    def counted(compiled_source: bytes, **launch: Any) -> list[mx.array]:
        given.append(len(compiled_source))
        return run(compiled_source=compiled_source, **launch)

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", counted)
    text = text_of("once", "", "y[0] = x[0];", [ArrayArgument("x", mx.int32)], [ArrayArgument("y", mx.int32)])
    kernel = cuda_compile.Compiled(text, views=False)
    for number in (3, 4):
        (y,) = kernel([mx.array([number])], [(1,)], [mx.int32], grid=(1, 1, 1), threadgroup=(1, 1, 1))
        assert y.item() == number
    assert [size > 0 for size in given] == [True, False, False]


@pytest.mark.usefixtures("untried")
def test_without_a_compiler_mlx_compiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda_compiler._version.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(cuda_compiler, "library", lambda: None)
    assert not cuda_compile.works(HEADER)
    assert "NVRTC" in caplog.text


@needs_emulation
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("fault", ["no compiler", "a kernel that does not compile"])
def test_what_we_cannot_compile_mlx_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    cuda_emulated.install(monkeypatch)
    real = cuda_compiler.kept_machine_code

    def compiled(text: str, architecture: str) -> bytes:
        if fault == "no compiler" or "decode_planes" in text:
            raise cuda_compiler.CompileError("not today")
        return real(text, architecture)

    monkeypatch.setattr(cuda_compiler, "kept_machine_code", compiled)
    fresh = dataclasses.replace(cuda_kernels.decode_planes())
    monkeypatch.setattr(cuda_kernels, "decode_planes", lambda: fresh)
    planes = PlanesCodec(4).encode(keys(2, 70, 64))
    wanted = planes.codec.decode(planes, mx.float32)
    assert mx.allclose(cuda_planes.decode_planes(planes, mx.float32), wanted, rtol=0, atol=1e-6)
    assert "left to MLX" in caplog.text
    assert "not today" in caplog.text
