"""The bytes of arrays that lie on an NVIDIA GPU, for the host.

MLX moves an array that the host looks at into memory that both share. The addresses that launches were given then point
to memory that is free, and the GPU waits for every page of the shared one when it gets it again, for whatever array. So
the host looks at no array that is stored: the driver copies its bytes, from a copy that no launch reads.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.codecs.cuda.addresses import PLANES_PLACES, take

logger = logging.getLogger(__name__)

_AT_ONCE = len(PLANES_PLACES)

_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

_TRIED = 3000


def copy_octets(arrays: Sequence[mx.array], into: Sequence[np.ndarray]) -> None:  # of each: uint8 [bytes]
    """The bytes of each array, without gaps, to where they are to lie."""
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
    """Its bits, in memory of their own."""
    return array.reshape(-1).view(_BITS[array.itemsize]) | 0


@cache
def works() -> bool:
    """Whether the driver copies what MLX has computed: tried once."""
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
    """NVIDIA's, which MLX has loaded. What it does is about the context of the thread that calls it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t)

    def make_current(self) -> None:
        """The context that MLX computes in, where the thread has none yet."""
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
