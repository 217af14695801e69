"""The CUDA kernels, compiled by the system's C++ compiler and run on this machine's processor: see cuda_emulated.h."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.codecs.cuda_kernels import FOLDER, Constant, Kernel, without_comments
from tests.attention.plain_kernels import COMPILER

TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.uint64: "unsigned long",
}
_HERE = Path(__file__).parent


def run(kernel: Kernel, constants: tuple[Constant, ...], **launch: Any) -> list[mx.array]:
    """In place of `Kernel.run`."""
    inputs, shapes, dtypes = (launch[name] for name in ("inputs", "output_shapes", "output_dtypes"))
    views = [_view(array if kernel.views else mx.contiguous(array)) for array in inputs]
    outputs = [np.full(shape, 0xFF, _words(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    source = kernel.source(constants)
    beside: list[np.ndarray] = []
    lines = []
    for i, (name, array) in enumerate(zip(kernel.inputs, inputs, strict=True)):
        lines.append(_declared(f"const {TYPES[array.dtype]}*", name, i))
    for i, (name, dtype) in enumerate(zip(kernel.outputs, dtypes, strict=True)):
        lines.append(_declared(f"{TYPES[dtype]}*", name, len(inputs) + i))
    for name, view in zip(kernel.inputs, views, strict=True):
        for what, ctype, numbers in (
            ("shape", np.int32, view.shape),
            ("strides", np.int64, [step // view.itemsize for step in view.strides]),
        ):
            if f"{name}_{what}" in source:
                kind = "const int*" if what == "shape" else "const long*"
                lines.append(_declared(kind, f"{name}_{what}", len(inputs) + len(outputs) + len(beside)))
                beside.append(np.array(numbers, ctype))
    header = kernel.header.replace(without_comments(FOLDER / "intrinsics.cuh"), "")
    text = f"{header}\nstatic void kernel(void** arguments) {{\n{''.join(lines)}{source}\n}}\n"
    addresses = [array.ctypes.data for array in (*views, *outputs, *beside)]
    threads = launch["threadgroup"][0]
    x, y, z = launch["grid"]
    _library(text).emulate((ctypes.c_void_p * len(addresses))(*addresses), threads, -(-x // threads), y, z)
    return [mx.array(out).view(dtype) for out, dtype in zip(outputs, dtypes, strict=True)]


def _declared(kind: str, name: str, number: int) -> str:
    return f"  {kind} {name} = static_cast<{kind}>(arguments[{number}]);\n"


def _words(dtype: mx.Dtype) -> type[np.unsignedinteger]:
    return {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]


def _view(array: mx.array) -> np.ndarray:
    """Where it lies, not a copy: kernels take addresses, and write to what these point to."""
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="kvstrata-cuda-"))


@cache
def _library(text: str) -> ctypes.CDLL:
    assert COMPILER is not None
    source = f'#include "{_HERE}/cuda_emulated.h"\n{text}\n#include "{_HERE}/cuda_emulated_run.h"\n'
    name = hashlib.blake2s(source.encode(), digest_size=8).hexdigest()
    file, library = _folder() / f"{name}.cpp", _folder() / f"{name}.so"
    file.write_text(source)
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"]
    done = subprocess.run([*command, str(file), "-o", str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))
