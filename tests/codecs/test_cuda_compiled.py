"""CUDA kernels that we compile: their parameters, and the trial before the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.backend import nvrtc
from kvstrata.codecs import cuda_compiled
from kvstrata.codecs.cuda_compiled import Array, Size, text_of
from tests.attention import cuda_emulated

needs_emulation = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not cuda_emulated.works(), reason="needs Linux and a C++ compiler, and no GPU"
)


@pytest.fixture
def untried() -> Iterator[None]:
    cuda_compiled.works.cache_clear()
    yield
    cuda_compiled.works.cache_clear()


def test_sizes_are_parameters_after_the_arrays() -> None:
    source = "  y[0] = b_shape[1] + a_b_shape[0] * b_shape[0] + b_shape[1];"
    inputs = [Array("b", mx.float16), Array("a_b", mx.uint64)]
    name, text, sizes = text_of("sum", "// before\n", source, inputs, [Array("y", mx.int32)])
    assert sizes == (Size(0, 1), Size(1, 0), Size(0, 0))
    assert "y[0] = b_size1 + a_b_size0 * b_size0 + b_size1;" in text
    parameters = "const __half* b, const unsigned long long* a_b, int* y, const int b_size1, const int a_b_size0"
    assert f'// before\n\nextern "C" __global__ void {name}({parameters}, const int b_size0) {{' in text
    assert name.startswith("kvstrata_sum_")


def test_no_two_kernels_have_the_same_name() -> None:
    """MLX knows them by their names alone."""
    y, half, single = [Array("y", mx.int32)], [Array("x", mx.float16)], [Array("x", mx.float32)]
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
    assert cuda_compiled.works()


@needs_emulation
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("fault", ["sizes in another order", "a view that was not copied"])
def test_the_trial_notices(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    cuda_emulated.install(monkeypatch)
    run: Any = mx.fast.precompiled_cuda_kernel

    def wrong(*, scalars: list[int], ensure_row_contiguous: bool, **launch: Any) -> list[mx.array]:
        if fault == "sizes in another order":
            return run(scalars=scalars[::-1], ensure_row_contiguous=ensure_row_contiguous, **launch)
        return run(scalars=scalars, ensure_row_contiguous=not ensure_row_contiguous, **launch)

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", wrong)
    assert not cuda_compiled.works()
    assert "wrong numbers" in caplog.text


@pytest.mark.usefixtures("untried")
def test_without_a_compiler_mlx_compiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    nvrtc._version.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    assert not cuda_compiled.works()
    assert "nvidia-cuda-nvrtc" in caplog.text
