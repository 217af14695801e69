"""The CUDA kernels, compiled by the system's C++ compiler and run on this machine's processor: see cuda_emulated.h."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.codecs.cuda_kernels import FOLDER, Constant, Kernel, without_comments
from tests.attention.plain_kernels import COMPILER
from tests.codecs.nvrtc import TYPES

_OPTIONS = ("-std=c++17", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing")
_HERE = Path(__file__).parent
_BACKWARDS = itertools.cycle((False, True))


def run(kernel: Kernel, constants: tuple[Constant, ...], **launch: Any) -> list[mx.array]:
    """In place of `Kernel.run`."""
    inputs, shapes, dtypes = (launch[name] for name in ("inputs", "output_shapes", "output_dtypes"))
    views = [_view(array if kernel.views else mx.contiguous(array)) for array in inputs]
    # All ones: NaN where nothing is written.
    outputs = [_ones(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
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
    given = (ctypes.c_void_p * len(addresses))(*addresses)
    _library(text).emulate(given, threads, -(-x // threads), y, z, next(_BACKWARDS))
    return [mx.array(out).view(dtype) for out, dtype in zip(outputs, dtypes, strict=True)]


def _declared(kind: str, name: str, number: int) -> str:
    return f"  {kind} {name} = static_cast<{kind}>(arguments[{number}]);\n"


def _ones(shape: Sequence[int], dtype: mx.Dtype) -> np.ndarray:
    words = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]
    return np.full(shape, np.iinfo(words).max, words)


def _view(array: mx.array) -> np.ndarray:
    """Where it lies, not a copy: kernels take addresses, and write to what these point to."""
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@cache
def works() -> bool:
    """Whether there is a compiler that takes it, on a system that has such fibers."""
    if COMPILER is None or sys.platform != "linux":
        return False
    command = [COMPILER, *_OPTIONS, "-fsyntax-only", str(_HERE / "cuda_emulated.h")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="kvstrata-cuda-")


@cache
def _library(text: str) -> ctypes.CDLL:
    assert COMPILER is not None
    source = f'#include "{_HERE}/cuda_emulated.h"\n{text}\n#include "{_HERE}/cuda_emulated_run.h"\n'
    name = hashlib.blake2s(source.encode(), digest_size=8).hexdigest()
    file, library = (Path(_folder().name) / f"{name}.{ending}" for ending in ("cpp", "so"))
    file.write_text(source)
    command = [COMPILER, *_OPTIONS, "-O1", "-shared", "-fPIC", str(file), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))
