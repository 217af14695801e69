"""NVIDIA's compiler for text, NVRTC: the machine code of a kernel, made once and kept in the cache folder.

MLX has this library loaded wherever it computes on CUDA. Knows text and machine code; does not know kernels or MLX.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2s
from importlib.util import find_spec
from pathlib import Path

from kvstrata.backend.folders import cache_root

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_DIGEST_BYTES = 16  # a file begins with them
_UNUSED_S = 90 * 24 * 3600  # a file that no start has read for so long is removed


class CompileError(RuntimeError):
    pass


def kept_machine_code(text: str, architecture: str) -> bytes:
    """Of kernels in CUDA C++, for an architecture such as sm_90. Compiled once on this machine."""
    key = blake2s("\0".join((_version(), architecture, text)).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    path = cache_root() / "cuda" / f"{key}.cubin"
    code = _read(path)
    if code is None:
        code = machine_code(text, architecture)
        _write(path, code)
    return code


def machine_code(text: str, architecture: str) -> bytes:
    """As above, compiled now."""
    return _compile(text, (f"--gpu-architecture={architecture}",), "CUBIN")


def complaints(text: str) -> str:
    """Of the compiler; "": it compiles. Nothing is made that could run, which takes less time."""
    try:
        _compile(text, ("--gpu-architecture=compute_90", "--Ofast-compile=max"), "PTX")
    except CompileError as error:
        return str(error)
    return ""


@cache
def library() -> ctypes.CDLL | None:
    """The one that MLX has loaded, else one that is installed beside it."""
    found = [path for folder in _wheels() for path in sorted(folder.glob("lib/libnvrtc.so.*"))]
    for name in (*_SONAMES, *map(str, found)):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _compile(text: str, options: tuple[str, ...], result: str) -> bytes:
    call = _caller()
    program = ctypes.c_void_p()
    call("CreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        given = [option.encode() for option in (*options, *_includes())]
        try:
            call("CompileProgram", program, len(given), (ctypes.c_char_p * len(given))(*given))
        except CompileError as error:
            log = _bytes_of(call, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CompileError(f"{error}: {log}") from None
        return _bytes_of(call, program, result)
    finally:
        call("DestroyProgram", ctypes.byref(program))


def _caller() -> Callable[..., None]:
    nvrtc = library()
    if nvrtc is None:
        raise CompileError("NVIDIA's compiler is not installed (the package nvidia-cuda-nvrtc has it)")

    def call(name: str, *arguments: object) -> None:
        code = getattr(nvrtc, f"nvrtc{name}")(*arguments)
        if code:
            raise CompileError(f"nvrtc{name} says {code}")

    return call


def _bytes_of(call: Callable[..., None], program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    call(f"Get{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    call(f"Get{what}", program, buffer)
    return buffer.raw


@cache
def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _caller()("Version", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@cache
def _includes() -> tuple[str, ...]:
    return tuple(f"--include-path={folder}" for folder in _header_folders() if folder.is_dir())


def _header_folders() -> Iterator[Path]:
    """Where MLX looks for CUDA's headers, and in the same order."""
    for place in _packages("mlx"):
        yield place / "include" / "cccl"
    for folder in _wheels():
        yield folder / "include"
        yield folder / "include" / "cccl"
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "include"


def _wheels() -> list[Path]:
    """What NVIDIA's packages have put side by side."""
    return [folder for place in _packages("nvidia") for folder in sorted(place.iterdir()) if folder.is_dir()]


def _packages(name: str) -> list[Path]:
    spec = find_spec(name)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    return [place for place in places if place.is_dir()]


def _read(path: Path) -> bytes | None:
    """None: not there, or damaged."""
    try:
        digest, code = (data := path.read_bytes())[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if digest != _digest(code):
            return None
        os.utime(path)
    except OSError:
        return None
    return code


def _write(path: Path, code: bytes) -> None:
    """Published by rename. Without room or permission the next start compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_digest(code) + code)
        os.replace(file.name, path)
        for other in path.parent.iterdir():
            if other.stat().st_mtime < time.time() - _UNUSED_S:
                other.unlink(missing_ok=True)
    except OSError:
        return


def _digest(code: bytes) -> bytes:
    return blake2s(code, digest_size=_DIGEST_BYTES).digest()
