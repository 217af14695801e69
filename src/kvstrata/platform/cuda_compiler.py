"""NVIDIA's run-time compiler (NVRTC), and the hash with which MLX's kernel cache identifies machine code.

Machine code of a kernel is compiled once and kept in the cache folder. MLX loads NVRTC wherever it computes on CUDA.
The hash is that of GNU's C++ library on 64 bits, MurmurHash64A. It can be inverted: any text can be extended so that it
has the hash of another one.
"""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import blake2s
from importlib.util import find_spec
from pathlib import Path

from kvstrata.platform.files import cache_root

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_OPTIONS = ("--disable-warnings",)
_DIGEST_BYTES = 16  # a file begins with them
_LOG_CHARACTERS = 500  # the first error; others mostly follow from it
_UNUSED_S = 90 * 24 * 3600  # a file that no start has read for so long is removed
_SEED = 0xC70F6907
_FACTOR = 0xC6A4A7935BD1E995
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_MASK = (1 << 64) - 1
_WORD = 8  # bytes


class CompileError(RuntimeError):
    """The compiler's message. Never leaves kvstrata: MLX compiles the kernels then."""


def kept_machine_code(text: str, architecture: str) -> bytes:
    """Return machine code of CUDA C++ for an architecture such as sm_90. Compiled once on this machine."""
    made_from = (str(_version()), *_OPTIONS, architecture, text)
    key = blake2s("\0".join(made_from).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    path = cache_root() / "cuda" / f"{key}.cubin"
    code = _read(path)
    if code is None:
        code = machine_code(text, architecture)
        _write(path, code)
    return code


def machine_code(text: str, architecture: str) -> bytes:
    """Like `kept_machine_code`, but compiled now and not kept."""
    return _compile(text, (f"--gpu-architecture={architecture}",), "CUBIN")


def assembly(text: str) -> str:
    """Return PTX that was hardly optimized: tests learn in a tenth of the time whether a text compiles."""
    return _compile(text, ("--gpu-architecture=compute_90", "--Ofast-compile=max"), "PTX").rstrip(b"\0").decode()


@cache
def library() -> ctypes.CDLL | None:
    """Return the NVRTC that MLX has loaded, else one that is installed."""
    installed = [str(path) for folder in _wheels() for path in sorted(folder.glob("lib/libnvrtc.so.*"))]
    loaded_only = getattr(os, "RTLD_NOLOAD", 0)
    for name, mode in [(name, loaded_only) for name in _SONAMES] + [(name, 0) for name in (*_SONAMES, *installed)]:
        try:
            return ctypes.CDLL(name, mode)
        except OSError:
            continue
    return None


def _compile(text: str, options: tuple[str, ...], result: str) -> bytes:
    call = _caller()
    program = ctypes.c_void_p()
    call("CreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        given = [option.encode() for option in (*_OPTIONS, *options, *_includes())]
        try:
            call("CompileProgram", program, len(given), (ctypes.c_char_p * len(given))(*given))
        except CompileError as error:
            log = _bytes_of(call, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CompileError(f"{error}: {log.strip()[:_LOG_CHARACTERS]}") from None
        return _bytes_of(call, program, result)
    finally:
        call("DestroyProgram", ctypes.byref(program))


def _caller() -> Callable[..., None]:
    nvrtc = library()
    if nvrtc is None:
        raise CompileError("NVIDIA's compiler (NVRTC) was not found")

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
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _caller()("Version", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def _includes() -> tuple[str, ...]:
    return tuple(f"--include-path={folder}" for folder in _header_folders() if folder.is_dir())


def _header_folders() -> Iterator[Path]:
    """Yield folders that may have CUDA's headers, in MLX's order: packages, then the system."""
    for place in _packages("mlx"):
        yield place / "include" / "cccl"
    for folder in _wheels():
        if not folder.name.startswith("cu1") or folder.name == f"cu{_version()[0]}":
            yield folder / "include"
            yield folder / "include" / "cccl"
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "include"


def _wheels() -> list[Path]:
    """Return the folders of NVIDIA's packages, which are side by side."""
    return [folder for place in _packages("nvidia") for folder in sorted(place.iterdir()) if folder.is_dir()]


def _packages(name: str) -> list[Path]:
    spec = find_spec(name)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    return [place for place in places if place.is_dir()]


def _read(path: Path) -> bytes | None:
    """Return the machine code in a file; None: missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[_DIGEST_BYTES:]
    if data[:_DIGEST_BYTES] != _digest(code):
        return None
    with suppress(OSError):  # another user's file, or a disk that cannot be written
        os.utime(path)
    return code


def _write(path: Path, code: bytes) -> None:
    """Publish machine code by a rename; remove old files. Without room or permission the next start compiles again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
            made = Path(folder) / path.name
            made.write_bytes(_digest(code) + code)
            made.replace(path)
        for file in path.parent.glob("*.cubin"):
            if file.stat().st_mtime < time.time() - _UNUSED_S:
                file.unlink(missing_ok=True)


def _digest(code: bytes) -> bytes:
    return blake2s(code, digest_size=_DIGEST_BYTES).digest()


def string_hash(text: bytes) -> int:
    """Return `std::hash<std::string>` of a text."""
    whole = len(text) - len(text) % _WORD
    state = _after(_words(text[:whole]), len(text))
    if whole < len(text):
        state = (state ^ int.from_bytes(text[whole:], "little")) * _FACTOR & _MASK
    return _folded(_folded(state) * _FACTOR & _MASK)


def hashed_alike(text: bytes, other: bytes) -> bytes:
    """Return `text`, zeros up to a whole word, and a word with which it has the hash of `other`."""
    padded = text + bytes(-len(text) % _WORD)
    # Backwards from the end: what the state has to be after the last word, then which word makes it so.
    wanted = _folded(_folded(string_hash(other)) * _INVERSE & _MASK)
    mixed = (wanted * _INVERSE & _MASK) ^ _after(_words(padded), len(padded) + _WORD)
    word = _folded(mixed * _INVERSE & _MASK) * _INVERSE & _MASK
    return padded + struct.pack("<Q", word)


def _after(words: Iterable[int], length: int) -> int:
    """Return the state of the hash after the first words of a text of `length` bytes."""
    state = _SEED ^ length * _FACTOR & _MASK
    for word in words:
        state = (state ^ _folded(word * _FACTOR & _MASK) * _FACTOR & _MASK) * _FACTOR & _MASK
    return state


def _words(text: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(text) // _WORD}Q", text)


def _folded(word: int) -> int:
    """Mix the upper bits of a word into the lower ones. The function is its own inverse."""
    return word ^ word >> 47
