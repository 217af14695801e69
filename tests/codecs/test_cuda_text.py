"""Every CUDA kernel of a decode step compiles, on machines without a GPU too."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.addresses import COLLECTED, PLANES_PLACES, RAW_PLACES
from kvstrata.codecs.cuda.kernels import Constant, Kernel
from kvstrata.codecs.cuda.planes import blocks_for
from kvstrata.platform import cuda_compiler

pytestmark = pytest.mark.skipif(cuda_compiler.library() is None, reason="needs nvidia-cuda-nvrtc, -runtime and -cccl")

TABLES = dict.fromkeys(("places", "pieces", "kinds"), mx.int32) | {"addresses": mx.uint64, "counters": mx.uint32}


PLANES = dict.fromkeys(("top", "next", "low"), mx.uint32) | dict.fromkeys(("scales", "means"), mx.float16)
ROTATION = (("PAIRS", 64), ("FIRST", 0), ("INTERLEAVED", False))
NO_ROTATION = (("PAIRS", 0), ("FIRST", 0), ("INTERLEAVED", False))


def assembled(kernel: Kernel, constants: tuple[Constant, ...], dtypes: dict[str, mx.Dtype]) -> str:
    return cuda_compiler.assembly(text_of(kernel, constants, dtypes))


def text_of(kernel: Kernel, constants: tuple[Constant, ...], dtypes: dict[str, mx.Dtype]) -> str:
    """`dtypes`: of inputs and outputs that are not float32."""
    types = [[dtypes.get(name, mx.float32) for name in names] for names in (kernel.inputs, kernel.outputs)]
    return kernel.text(constants, *types).text


def named(prefix: str) -> dict[str, mx.Dtype]:
    return {f"{prefix}_{name}": dtype for name, dtype in PLANES.items()}


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
def test_step_kernel_compiles(dtype: mx.Dtype, k_dim: int, v_dim: int, tiles: int) -> None:
    constants = (("BF", dtype == mx.bfloat16), ("K_DIM", k_dim), ("V_DIM", v_dim), ("TILES", tiles))
    dtypes = TABLES | dict.fromkeys(("q", "k_new", "v_new", "out"), dtype)
    blocks = blocks_for(tiles, max(k_dim, v_dim))
    lines = assembled(cuda_kernels.step(blocks), constants, dtypes).splitlines()
    assert ".maxntid 128, 1, 1" in lines
    assert f".minnctapersm {blocks}" in lines


@pytest.mark.parametrize("places", [RAW_PLACES, PLANES_PLACES])
def test_address_kernel_compiles(places: tuple[int, ...]) -> None:
    kernel = cuda_kernels.addresses(places)
    assert assembled(kernel, (), dict.fromkeys(kernel.inputs, mx.bfloat16) | {"out": mx.uint64})


def test_collect_kernel_compiles() -> None:
    kernel = cuda_kernels.collect(COLLECTED)
    assert assembled(kernel, (), dict.fromkeys((*kernel.inputs, "out"), mx.uint64))


@pytest.mark.parametrize(("dtype", "rotation", "place"), [(mx.bfloat16, ROTATION, 0), (mx.float16, NO_ROTATION, 5)])
def test_join_kernel_compiles(dtype: mx.Dtype, rotation: tuple[Constant, ...], place: int) -> None:
    constants = (("T", dtype), ("DIM", 128), ("PLACE", place), *rotation)
    types = {"ranges": mx.int32, "starts": mx.int32, "addresses": mx.uint64, "own": dtype, "out": dtype}
    assert assembled(cuda_kernels.decode_ranges(), constants, types)


@pytest.mark.parametrize(("bits", "rotation"), [(8, ROTATION), (4, NO_ROTATION), (2, ROTATION)])
def test_encode_kernel_compiles(bits: int, rotation: tuple[Constant, ...]) -> None:
    """To machine code: shared memory is known then."""
    constants = (("T", mx.bfloat16), ("BITS", bits), ("DIM", 128), *rotation)
    text = text_of(cuda_kernels.encode_planes(), constants, PLANES | {"x": mx.bfloat16, "starts": mx.int32})
    assert cuda_compiler.machine_code(text, "sm_90")


@pytest.mark.parametrize("rotation", [ROTATION, NO_ROTATION])
def test_decode_kernel_compiles(rotation: tuple[Constant, ...]) -> None:
    constants = (("T", mx.float16), ("DIM", 128), *rotation)
    text = text_of(cuda_kernels.decode_planes(), constants, named("k") | {"starts": mx.int32, "out": mx.float16})
    assert cuda_compiler.machine_code(text, "sm_90")


@pytest.mark.parametrize("rotation", [ROTATION, NO_ROTATION])
def test_score_kernel_compiles(rotation: tuple[Constant, ...]) -> None:
    k_rotation = tuple((f"K_{name}", number) for name, number in rotation)
    constants = (("T", mx.bfloat16), ("K_BITS", 8), ("K_DIM", 128), ("TILES", 2), *k_rotation)
    assert assembled(cuda_kernels.score_planes(), constants, named("k") | {"q": mx.bfloat16, "pieces0": mx.int32})


def test_mix_kernel_compiles() -> None:
    constants = (("V_BITS", 4), ("V_DIM", 256), ("TILES", 1))
    assert assembled(cuda_kernels.mix_planes(), constants, named("v") | {"pieces0": mx.int32})


def test_combine_kernel_compiles() -> None:
    constants = (("T", mx.float16), ("V_DIM", 64), ("HAS_SINKS", True))
    assert assembled(cuda_kernels.combine(2), constants, {"out": mx.float16})


def test_compiler_reports_an_error() -> None:
    constants = (("BF", True), ("K_DIM", 128), ("V_DIM", 128), ("TILES", "one"))
    with pytest.raises(cuda_compiler.CompileError, match="TILES"):
        assembled(cuda_kernels.step(3), constants, TABLES)  # pyright: ignore[reportArgumentType]
