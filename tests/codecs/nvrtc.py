"""NVIDIA's compiler for text at run time, which needs no GPU: whether the CUDA kernels compile.

It is found where its wheels (nvidia-cuda-nvrtc, nvidia-cuda-runtime, nvidia-cuda-cccl) are installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import mlx.core as mx

from kvstrata.codecs.cuda_kernels import Constant, Kernel

# What MLX puts around a kernel, as far as ours use it.
_BEFORE = """
#define INFINITY __int_as_float(0x7f800000)
struct Shape { int sizes[10]; __device__ int operator[](int i) const { return sizes[i]; } };
struct Strides { long long sizes[10]; __device__ long long operator[](int i) const { return sizes[i]; } };
"""
TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.uint64: "unsigned long",
}
# Nothing is run, so nothing has to be fast: a virtual architecture, and no optimizing.
_OPTIONS = (b"--gpu-architecture=compute_90", b"--Ofast-compile=max")


@cache
def library() -> ctypes.CDLL | None:
    found = [path for folder in _folders() for path in sorted(folder.glob("lib/libnvrtc.so.*"))]
    return ctypes.CDLL(str(found[0])) if found else None


def _folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return [folder for place in places for folder in sorted(Path(place).iterdir()) if folder.is_dir()]


def complaints(kernel: Kernel, constants: tuple[Constant, ...], dtypes: dict[str, mx.Dtype]) -> str:
    """Of the compiler; "": it compiles. `dtypes`: of inputs and outputs that are not float32."""
    nvrtc = library()
    assert nvrtc is not None
    text, program = _text(kernel, constants, dtypes).encode(), ctypes.c_void_p()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None)
    includes = [path for folder in _folders() for path in (folder / "include", folder / "include" / "cccl")]
    options = [*_OPTIONS, *(f"--include-path={path}".encode() for path in includes)]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return (log.value.decode() or f"error {failed}") if failed else ""


def _text(kernel: Kernel, constants: tuple[Constant, ...], dtypes: dict[str, mx.Dtype]) -> str:
    source = kernel.source(constants)
    parameters = []
    for name in kernel.inputs:
        parameters.append(f"const {TYPES[dtypes.get(name, mx.float32)]}* {name}")
        kinds = [kind for kind in ("Shape", "Strides") if f"{name}_{kind.lower()}" in source]
        parameters += [f"const __grid_constant__ {kind} {name}_{kind.lower()}" for kind in kinds]
    parameters += [f"{TYPES[dtypes.get(name, mx.float32)]}* {name}" for name in kernel.outputs]
    return f"{_BEFORE}{kernel.header}\n__global__ void kernel({', '.join(parameters)}) {{\n{source}\n}}\n"
