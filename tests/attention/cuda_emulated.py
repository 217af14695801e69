"""The CUDA kernels, compiled by the system's C++ compiler and run on this machine's processor: see cuda_emulated.h."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs.backends import runtime
from kvstrata.codecs.cuda.compile import TYPES
from kvstrata.codecs.cuda.kernels import FOLDER, without_comments
from kvstrata.platform import cuda_compiler
from kvstrata.platform.cuda_compiler import string_hash
from tests.attention.plain_kernels import COMPILER

_OPTIONS = ("-std=c++17", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing")
_HERE = Path(__file__).parent
_BACKWARDS = itertools.cycle((False, True))


# By names of kernels and hashes of their code, as MLX has them.
_known: dict[tuple[str, int], bytes] = {}


def install(patch: pytest.MonkeyPatch) -> None:
    """In place of NVIDIA's compiler and of MLX's kernels."""
    runtime().checks.clear()
    patch.setattr(cuda_compiler, "kept_machine_code", lambda text, _: _compiled(text))
    patch.setattr(mx.fast, "precompiled_cuda_kernel", _run_precompiled)
    patch.setattr(mx.fast, "cuda_kernel", _CompiledByMlx)


def _run_precompiled(
    *,
    name: str,
    compiled_source: bytes,
    inputs: Sequence[mx.array],
    scalars: Sequence[int],
    ensure_row_contiguous: bool,
    **launch: Any,
) -> list[mx.array]:
    path = _known.setdefault((name, string_hash(compiled_source)), compiled_source)
    views = [_view(mx.contiguous(array) if ensure_row_contiguous else array) for array in inputs]
    return _run(path, views, [np.array(number, np.int32) for number in scalars], **launch)


class _CompiledByMlx:
    """A kernel that MLX compiles, and tells shapes and strides."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
    ) -> None:
        self._needs_copies = ensure_row_contiguous
        self._name, self._inputs, self._outputs = name, input_names, output_names
        self._source, self._header = source, header

    def __call__(self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], **launch: Any) -> list[mx.array]:
        views = [_view(mx.contiguous(array) if self._needs_copies else array) for array in inputs]
        types = [TYPES[array.dtype] for array in inputs]
        parameters = [f"const {kind}* {name}" for kind, name in zip(types, self._inputs, strict=True)]
        parameters += [f"{TYPES[dtype]}* {name}" for dtype, name in zip(output_dtypes, self._outputs, strict=True)]
        beside: list[np.ndarray] = []
        for name, view in zip(self._inputs, views, strict=True):
            strides = np.array([step // view.itemsize for step in view.strides], np.int64)
            for what, numbers in (("shape", np.array(view.shape, np.int32)), ("strides", strides)):
                if f"{name}_{what}" in self._source:
                    parameters.append(f"const {'int' if what == 'shape' else 'long'}* {name}_{what}")
                    beside.append(numbers)
        text = f"{self._header}\n__global__ void {self._name}({', '.join(parameters)}) {{\n{self._source}\n}}\n"
        return _run(_compiled(text), views, beside, output_dtypes=output_dtypes, **launch)


def _run(
    path: bytes,
    views: Sequence[np.ndarray],
    beside: Sequence[np.ndarray],
    *,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> list[mx.array]:
    # All ones: NaN where nothing is written.
    outputs = [_ones(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
    addresses = [array.ctypes.data for array in (*views, *outputs, *beside)]
    given = (ctypes.c_void_p * len(addresses))(*addresses)
    threads = threadgroup[0]
    _loaded(path).emulate(given, threads, -(-grid[0] // threads), *grid[1:], next(_BACKWARDS))
    return [mx.array(out).view(dtype) for out, dtype in zip(outputs, output_dtypes, strict=True)]


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
def _compiled(text: str) -> bytes:
    """Text of one kernel -> the path of a library, which ends with a zero"""
    assert COMPILER is not None
    (name,) = re.findall(r"__global__ void (\w+)\(", text)
    text = text.replace(without_comments(FOLDER / "intrinsics.cuh"), "")
    before, after = (f'#include "{_HERE / name}"\n' for name in ("cuda_emulated.h", "cuda_emulated_run.h"))
    source = f"{before}{text}\n#define KERNEL {name}\n{after}"
    digest = hashlib.blake2s(source.encode(), digest_size=8).hexdigest()
    file, library = (Path(_folder().name) / f"{digest}.{ending}" for ending in ("cpp", "so"))
    file.write_text(source)
    command = [COMPILER, *_OPTIONS, "-O1", "-shared", "-fPIC", str(file), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return str(library).encode() + b"\0"


@cache
def _loaded(path: bytes) -> ctypes.CDLL:
    return ctypes.CDLL(path.partition(b"\0")[0].decode())
