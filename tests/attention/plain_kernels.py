"""The portable kernels, compiled by the system's C++ compiler and run lane by lane.

Around every input lies memory that is all ones: NaN as a float, whatever the size. A kernel that reads beyond an array
and uses what it finds gives NaN.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import numpy as np

from kvstrata.codecs.metal.kernel_text import KernelLaunch

COMPILER = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
MARGIN_BYTES = 4096
TYPES = {
    mx.float32: "float",
    mx.float16: "kv_half",
    mx.bfloat16: "kv_bfloat",
    mx.int32: "std::int32_t",
    mx.uint32: "kv_uint",
}


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="kvstrata-kernels-"))


def source_of(launch: KernelLaunch) -> str:
    """The whole of a C++ file."""
    text = launch.text
    inputs = [
        f"  const {TYPES[array.dtype]}* {name} = static_cast<const {TYPES[array.dtype]}*>(arguments[{i}]);\n"
        for i, (name, array) in enumerate(zip(text.inputs, launch.inputs, strict=True))
    ]
    outputs = [
        f"  {TYPES[dtype]}* {name} = static_cast<{TYPES[dtype]}*>(arguments[{len(inputs) + i}]);\n"
        for i, (name, dtype) in enumerate(zip(text.outputs, launch.dtypes, strict=True))
    ]
    unused = "".join(f"  (void){name};\n" for name in text.inputs)
    kernel = f"static void KV_KERNEL(void** arguments) {{\n{''.join([*inputs, *outputs])}{unused}{text.body}}}\n"
    return text.header + kernel + (Path(__file__).parent / "plain_run.h").read_text()


@cache
def _library(source: str) -> ctypes.CDLL:
    assert COMPILER is not None
    name = hashlib.blake2s(source.encode(), digest_size=8).hexdigest()
    file, library = _folder() / f"{name}.cpp", _folder() / f"{name}.so"
    file.write_text(source)
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"]
    done = subprocess.run([*command, str(file), "-o", str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def _bytes_of(array: mx.array) -> np.ndarray:
    bits = array.view({2: mx.uint16, 4: mx.uint32}[array.itemsize])
    return np.ascontiguousarray(np.array(bits)).reshape(-1).view(np.uint8)


def _guarded(octets: np.ndarray) -> tuple[np.ndarray, int]:
    """The array that holds the bytes, and their address."""
    room = np.full(octets.size + 2 * MARGIN_BYTES + 64, 0xFF, np.uint8)
    at = MARGIN_BYTES + (-(room.ctypes.data + MARGIN_BYTES)) % 64
    room[at : at + octets.size] = octets
    return room, room.ctypes.data + at


class Plain:
    """Runs launches on this machine's processor, and remembers them."""

    def __init__(self, *, backwards: bool = False) -> None:
        self._backwards = backwards
        self.launches: list[KernelLaunch] = []

    def __call__(self, launch: KernelLaunch) -> list[mx.array]:
        self.launches.append(launch)
        library = _library(source_of(launch))
        inputs = [_guarded(_bytes_of(array)) for array in launch.inputs]
        sizes = [int(np.prod(shape)) * dtype.size for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]
        outputs = [_guarded(np.full(size, 0xFF, np.uint8)) for size in sizes]
        before = [held.copy() for held, _ in inputs]
        addresses = [address for _, address in (*inputs, *outputs)]
        diverged = library.kv_run((ctypes.c_void_p * len(addresses))(*addresses), *launch.groups, int(self._backwards))
        assert not diverged, "lanes do not meet at the same points"
        assert all((a == held).all() for a, (held, _) in zip(before, inputs, strict=True)), "an input was written"
        made = []
        for (room, address), size, shape, dtype in zip(outputs, sizes, launch.shapes, launch.dtypes, strict=True):
            at = address - room.ctypes.data
            assert (room[:at] == 0xFF).all(), "written before the result"
            assert (room[at + size :] == 0xFF).all(), "written behind the result"
            words = room[at : at + size].copy().view({2: np.uint16, 4: np.uint32}[dtype.size])
            made.append(mx.array(words).view(dtype).reshape(shape))
        return made
