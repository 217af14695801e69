"""Copies of GPU arrays to the host. Without a GPU kernels are emulated, and the driver is a copy of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs import backends, dispatch
from kvstrata.codecs.cuda import host_copy as cuda_host_copy
from kvstrata.codecs.cuda.addresses import PLANES_PLACES, take
from tests.attention import cuda_emulated

ON_GPU = mx.cuda.is_available()
emulated = pytest.mark.skipif(ON_GPU or not cuda_emulated.works(), reason="needs a C++ compiler, and no GPU")


class PretendedDriver:
    def __init__(self, *, fault: str = "") -> None:
        self.fault = fault
        self.addresses: list[int] = []
        self.targets: list[int] = []

    def make_current(self) -> None:
        if self.fault == "no context":
            raise RuntimeError("cuCtxSetCurrent says 201")

    def copy(self, to: np.ndarray, address: int) -> None:
        self.addresses.append(address)
        self.targets.append(to.ctypes.data)
        ctypes.memmove(to.ctypes.data, address, to.nbytes)
        if self.fault == "other bytes":
            to[-1] += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[PretendedDriver]:
    made = PretendedDriver(fault=getattr(request, "param", ""))
    cuda_emulated.install(monkeypatch)
    monkeypatch.setattr(cuda_host_copy, "_driver", lambda: made)
    backends.runtime().checks.clear()
    yield made
    backends.runtime().checks.clear()


@pytest.fixture
def as_on_cuda() -> Iterator[None]:
    with backends.runtime().use_backend("cuda"):
        yield


def arrays() -> list[mx.array]:
    numbers = mx.random.normal((4, 6, 70), key=mx.random.key(3))
    made = [numbers.astype(dtype) for dtype in (mx.bfloat16, mx.float16, mx.float32)]
    made += [made[0][1:3, :, 5:9], made[1].swapaxes(0, 2), made[2][::2], mx.arange(5, dtype=mx.uint64)]
    made += [mx.array([True, False, True]), mx.arange(7).astype(mx.uint8), mx.arange(9).astype(mx.int64)]
    made += [mx.full((3, 2), i, mx.uint32) for i in range(5)]  # more than one launch takes
    mx.eval(made)
    return made


def bytes_of(array: mx.array) -> bytes:
    return np.ascontiguousarray(np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)).tobytes()


@emulated
@pytest.mark.usefixtures("as_on_cuda")
def test_host_copy_equals_the_arrays_and_moves_none(driver: PretendedDriver) -> None:
    given = arrays()
    found = [np.empty(array.nbytes, np.uint8) for array in given]
    dispatch.copy_to_host(given, found)
    assert [each.tobytes() for each in found] == [bytes_of(array) for array in given]
    places = {np.asarray(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a).ctypes.data for a in given}
    assert len(driver.addresses) == 1 + len(given), "with the trial"
    assert not places.intersection(driver.addresses), "launches may read there"
    assert dispatch.host_bytes(given[0]).tobytes() == bytes_of(given[0])


@emulated
@pytest.mark.usefixtures("as_on_cuda")
def test_host_copy_writes_into_given_memory(driver: PretendedDriver) -> None:
    assert cuda_host_copy.works()
    stacked = [mx.full((3, 2), i, mx.uint32) for i in range(5)]
    out = np.empty((5, 24), np.uint8)
    dispatch.copy_to_host(stacked, list(out))
    assert driver.targets[1:] == [row.ctypes.data for row in out], "after the trial"
    assert out.tobytes() == b"".join(map(bytes_of, stacked))


@emulated
@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("into", [[np.empty(23, np.uint8)], [np.empty(48, np.uint8)[::2]], []])
def test_host_copy_refuses_memory_that_does_not_fit(into: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"do not fit|shorter"):
        cuda_host_copy.copy_octets([mx.zeros((3, 2), mx.uint32)], into)


@emulated
@pytest.mark.parametrize("driver", ["no context", "other bytes"], indirect=True)
def test_host_copy_without_a_driver_uses_mlx(driver: PretendedDriver, caplog: pytest.LogCaptureFixture) -> None:
    given = arrays()
    found = [np.empty(array.nbytes, np.uint8) for array in given]
    cuda_host_copy.copy_octets(given, found)
    assert [each.tobytes() for each in found] == [bytes_of(array) for array in given]
    assert "the driver cannot be used" in caplog.text
    assert not cuda_host_copy.works()
    assert driver.fault


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU with CUDA")
def test_host_copy_on_a_gpu_leaves_arrays_in_place() -> None:
    def places(of: mx.array) -> list[int]:
        return np.array(take([of] * len(PLANES_PLACES), PLANES_PLACES)).tolist()

    array = mx.random.normal((8, 700, 128), key=mx.random.key(5)).astype(mx.bfloat16)
    mx.eval(array)
    before = places(array)
    assert cuda_host_copy.works()
    found = dispatch.host_bytes(array)
    assert places(array) == before
    assert found.tobytes() == bytes_of(array)
