"""Copies of arrays' bytes from an NVIDIA GPU to the host.

MLX moves an array that the host reads into memory that host and GPU share. Addresses in earlier launches then point to
freed memory, and the GPU waits for every page of the shared memory when MLX reuses it, for whatever array. The host
therefore reads no cached array: the driver copies the bytes, from a copy of the array that no launch reads.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.codecs.backends import checked_once
from kvstrata.codecs.cuda.addresses import PLANES_PLACES, take

logger = logging.getLogger(__name__)

_AT_ONCE = len(PLANES_PLACES)

_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

_TRIED = 3000


def copy_octets(arrays: Sequence[mx.array], into: Sequence[np.ndarray]) -> None:  # for each array uint8 [bytes]
    """Copy the bytes of each array to its destination, both without gaps."""
    for array, octets in zip(arrays, into, strict=True):
        if octets.nbytes != array.nbytes or not octets.flags.c_contiguous:
            raise ValueError(f"{array.nbytes} bytes do not fit into {octets.nbytes}, or not without gaps")
    if not works():
        for array, octets in zip(arrays, into, strict=True):
            octets[:] = np.asarray(copied(array)).view(np.uint8)
        return
    for at in range(0, len(arrays), _AT_ONCE):
        _by_driver(arrays[at : at + _AT_ONCE], into[at : at + _AT_ONCE])


def copied(array: mx.array) -> mx.array:
    """Copy the bits of an array to memory of their own."""
    return array.reshape(-1).view(_BITS[array.itemsize]) | 0


@checked_once
def works() -> bool:
    """Whether the driver copies arrays that MLX has computed; tried once."""
    tried = mx.arange(_TRIED, dtype=mx.uint32) * 2654435761
    wanted = np.arange(_TRIED, dtype=np.uint32) * np.uint32(2654435761)
    found = np.empty(tried.nbytes, np.uint8)
    try:
        _by_driver([tried], [found])
        if np.array_equal(found.view(np.uint32), wanted):
            return True
        fault = "it copies other bytes"
    except (OSError, RuntimeError, AttributeError) as failure:
        fault = str(failure)
    logger.warning("Stored KV is read through MLX, which is slow on a GPU: the driver cannot be used: %s", fault)
    return False


def _by_driver(arrays: Sequence[mx.array], into: Sequence[np.ndarray]) -> None:
    copies = [copied(array) for array in arrays]
    taken = take([*copies, *[copies[-1]] * (_AT_ONCE - len(copies))], PLANES_PLACES)
    mx.eval(copies, taken)
    driver = _driver()
    driver.make_current()
    for octets, address in zip(into, _numbers(taken), strict=False):
        driver.copy(octets, address)


def _numbers(addresses: mx.array) -> list[int]:
    return [int(address) for address in np.array(addresses)]


class Driver:
    """NVIDIA's driver, which MLX has loaded. Calls act on the context of the calling thread."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t)

    def make_current(self) -> None:
        """Set the context that MLX computes in, where the thread has none yet."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
            self._call("cuCtxSetCurrent", context)

    def copy(self, to: np.ndarray, address: int) -> None:
        if to.nbytes:
            self._call("cuMemcpyDtoH_v2", to.ctypes.data, address, to.nbytes)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} says {code}")


@cache
def _driver() -> Driver:
    return Driver()
