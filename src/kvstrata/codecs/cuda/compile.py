"""CUDA kernels that we compile ourselves and MLX runs.

MLX compiles its kernels at every start, behind headers of its own that take two seconds to read: half a minute for the
kernels of one model. Ours take tenths of a second each, and a start after the first only loads them.

MLX gives such a kernel its inputs, its outputs, then whole numbers: here the sizes of inputs that the source reads, and
whether the kernel is to do anything.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from hashlib import blake2s
from typing import NamedTuple

import mlx.core as mx

from kvstrata.codecs.backends import checked_once
from kvstrata.platform import cuda_compiler
from kvstrata.platform.cuda_compiler import hashed_alike

TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint8: "unsigned char",
    mx.uint16: "unsigned short",
    mx.uint32: "unsigned",
    mx.uint64: "unsigned long long",
}

_BEFORE = """#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
"""

logger = logging.getLogger(__name__)


class ArrayArgument(NamedTuple):
    name: str
    dtype: mx.Dtype


class SizeArgument(NamedTuple):
    """Size of an input along an axis."""

    number: int
    axis: int


class CudaText(NamedTuple):
    name: str  # of the kernel, unique to this text
    text: str
    inputs: tuple[ArrayArgument, ...]
    outputs: tuple[ArrayArgument, ...]
    sizes: tuple[SizeArgument, ...]


def text_of(
    name: str, header: str, source: str, inputs: Sequence[ArrayArgument], outputs: Sequence[ArrayArgument]
) -> CudaText:
    """Return the text of a kernel. `source` is the body; `x_shape[1]` in it is a size of the input x."""
    numbers = {array.name: number for number, array in enumerate(inputs)}
    sizes: list[SizeArgument] = []

    def parameter_of(found: re.Match[str]) -> str:
        size = SizeArgument(numbers[found[1]], int(found[2]))
        if size not in sizes:
            sizes.append(size)
        return f"{found[1]}_size{size.axis}"

    body = re.sub(r"\b(\w+)_shape\[(\d)\]", parameter_of, source)
    parameters = [
        *(f"const {TYPES[dtype]}* {name}" for name, dtype in inputs),
        *(f"{TYPES[dtype]}* {name}" for name, dtype in outputs),
        *(f"const int {inputs[size.number].name}_size{size.axis}" for size in sizes),
        "const int is_launch",
    ]
    after = f"({', '.join(parameters)}) {{\n  if (!is_launch) return;\n{body}\n}}\n"
    digest = blake2s((header + after).encode(), digest_size=8).hexdigest()
    unique = f"kvstrata_{name}_{digest}"
    text = f'{_BEFORE}{header}\nextern "C" __global__ void {unique}{after}'
    return CudaText(unique, text, tuple(inputs), tuple(outputs), tuple(sizes))


class Compiled:
    """A compiled kernel, which takes the arguments of MLX's kernels. MLX finds a kernel by its name and by a hash of
    its code, which MLX computes anew at every launch: 54 us for 289 kB, and the code of a decode step is larger. The
    code therefore gets an ending that gives it the hash of empty code. The first call, in `__init__`, passes the code
    and does nothing; the others pass no code."""

    def __init__(self, text: CudaText, *, views: bool) -> None:
        self._name = text.name
        self._sizes = text.sizes
        self._views = views
        code = cuda_compiler.kept_machine_code(text.text, str(mx.device_info()["architecture"]))
        inputs = [mx.zeros((1,), dtype) for _, dtype in text.inputs]
        dtypes = [dtype for _, dtype in text.outputs]
        nothing = [0] * (len(text.sizes) + 1)
        known_as_none = hashed_alike(code, b"")
        mx.eval(self._run(known_as_none, inputs, [(1,)] * len(dtypes), dtypes, (1, 1, 1), (1, 1, 1), nothing))

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        numbers = [inputs[number].shape[axis] for number, axis in self._sizes]
        return self._run(b"", inputs, output_shapes, output_dtypes, grid, threadgroup, [*numbers, 1])

    def _run(
        self,
        code: bytes,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        numbers: list[int],
    ) -> list[mx.array]:
        return mx.fast.precompiled_cuda_kernel(
            name=self._name,
            compiled_source=code,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=numbers,
            grid=grid,
            threadgroup=threadgroup,
            ensure_row_contiguous=not self._views,
        )


@checked_once
def works(header: str) -> bool:
    """Whether MLX runs kernels that we compile here behind this header; tried once."""
    try:
        if _tried(header):
            return True
        fault = "they give wrong numbers"
    except (RuntimeError, ValueError, KeyError) as failure:
        fault = str(failure)
    logger.warning("CUDA kernels are left to MLX, which compiles them at every start: ours do not run here: %s", fault)
    return False


def _tried(header: str) -> bool:
    """Try a kernel with a view, which MLX copies first, and with sizes that differ."""
    source = """
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= x_shape[0] * x_shape[1]) return;
  sums[i] = __half(float(x[i]) + float(*y));
  places[i] = 100 * y_shape[0] + i / x_shape[1];
"""
    inputs = (ArrayArgument("x", mx.uint32), ArrayArgument("y", mx.bfloat16))
    outputs = (ArrayArgument("sums", mx.float16), ArrayArgument("places", mx.int32))
    kernel = Compiled(text_of("trial", header, source, inputs, outputs), views=False)
    x = mx.arange(15, dtype=mx.uint32).reshape(3, 5)
    arrays, shapes = [x.T, mx.array([0.5], mx.bfloat16)], [(5, 3), (5, 3)]
    sums, places = kernel(arrays, shapes, [mx.float16, mx.int32], grid=(32, 1, 1), threadgroup=(32, 1, 1))
    wanted = 100 + mx.broadcast_to(mx.arange(5)[:, None], (5, 3))
    return bool((sums == x.T + 0.5).all().item()) and bool((places == wanted).all().item())
