"""Every CUDA kernel of a decode step compiles, on machines without a GPU too."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.attention.cuda_addresses import COLLECTED, PLANES_PLACES, RAW_PLACES
from kvstrata.backend import nvrtc
from kvstrata.codecs import cuda_kernels
from kvstrata.codecs.cuda_codes import blocks_for
from kvstrata.codecs.cuda_kernels import Constant, Kernel

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="needs nvidia-cuda-nvrtc, -runtime and -cccl")

TABLES = dict.fromkeys(("places", "pieces", "kinds"), mx.int32) | {"addresses": mx.uint64, "counters": mx.uint32}


def complaints(kernel: Kernel, constants: tuple[Constant, ...], dtypes: dict[str, mx.Dtype]) -> str:
    """`dtypes`: of inputs and outputs that are not float32."""
    types = [[dtypes.get(name, mx.float32) for name in names] for names in (kernel.inputs, kernel.outputs)]
    return nvrtc.complaints(kernel.text(constants, *types).text)


# Every size, every number of tiles, both types.
STEPS = [
    (mx.bfloat16, 64, 64, 1),
    (mx.float16, 64, 64, 2),
    (mx.bfloat16, 128, 128, 2),
    (mx.float16, 128, 128, 1),
    (mx.bfloat16, 192, 128, 1),
    (mx.float16, 256, 256, 1),
]


@pytest.mark.parametrize(("dtype", "k_dim", "v_dim", "tiles"), STEPS)
def test_a_step(dtype: mx.Dtype, k_dim: int, v_dim: int, tiles: int) -> None:
    constants = (("BF", dtype == mx.bfloat16), ("K_DIM", k_dim), ("V_DIM", v_dim), ("TILES", tiles))
    dtypes = TABLES | dict.fromkeys(("q", "k_new", "v_new", "out"), dtype)
    assert not complaints(cuda_kernels.step(blocks_for(tiles, max(k_dim, v_dim))), constants, dtypes)


@pytest.mark.parametrize("places", [RAW_PLACES, PLANES_PLACES])
def test_taking_addresses(places: tuple[int, ...]) -> None:
    kernel = cuda_kernels.addresses(places)
    assert not complaints(kernel, (), dict.fromkeys(kernel.inputs, mx.bfloat16) | {"out": mx.uint64})


def test_collecting_addresses() -> None:
    kernel = cuda_kernels.collect(COLLECTED)
    assert not complaints(kernel, (), dict.fromkeys((*kernel.inputs, "out"), mx.uint64))


@pytest.mark.parametrize(("dtype", "pairs", "place"), [(mx.bfloat16, 64, 0), (mx.float16, 0, 5)])
def test_joining_parts(dtype: mx.Dtype, pairs: int, place: int) -> None:
    constants = (
        *(("T", dtype), ("DIM", 128), ("PLACE", place)),
        *(("PAIRS", pairs), ("FIRST", 0), ("INTERLEAVED", False)),
    )
    types = {"signs": mx.float32, "angles": mx.float32, "spans": mx.int32, "starts": mx.int32, "addresses": mx.uint64}
    assert not complaints(cuda_kernels.decode_parts(), constants, types | {"own": dtype, "out": dtype})


def test_an_error_is_seen() -> None:
    constants = (("BF", True), ("K_DIM", 128), ("V_DIM", 128), ("TILES", "one"))
    assert "TILES" in complaints(cuda_kernels.step(3), constants, TABLES)  # pyright: ignore[reportArgumentType]
