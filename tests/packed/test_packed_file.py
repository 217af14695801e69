"""Files of packed weights: the same values at the next load, or a miss."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.load import load
from kvstrata.packed import block, packed_file
from kvstrata.packed.weight import pack
from tests.models.conftest import QUANTIZATION, quantized_module, write_model
from tests.packed.models import num_fused
from tests.support.models import tiny_config

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="weights are packed on a CPU alone")
PROMPT = mx.array([[5, 6, 7, 8]])


def write_quantized(folder: Path, architecture: str) -> str:
    config = {**tiny_config(architecture), "quantization": QUANTIZATION}
    return str(write_model(folder, quantized_module(architecture), config))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a folder with quantized weights, and keep files of packed weights in a folder of the test."""
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed_file, "MIN_PACKING_S", 0.0)
    return write_quantized(tmp_path / "tiny", "llama")


@pytest.fixture
def num_packed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the matrices packed since its last call."""
    packed: list[object] = []
    monkeypatch.setattr("kvstrata.packed.weight.pack", lambda source: packed.append(source) or pack(source))

    def count() -> int:
        number = len(packed)
        packed.clear()
        return number

    return count


def logits(model: str, weights: str = "auto") -> np.ndarray:
    return np.asarray(load(model, cpu=CpuOptions(weights=weights)).module(PROMPT))  # pyright: ignore[reportArgumentType]


def kept_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / "packed").iterdir())


def test_second_load_packs_nothing_and_keeps_logits(model: str, tmp_path: Path, num_packed: Callable[[], int]) -> None:
    first = logits(model)
    assert num_packed() > 0
    assert np.array_equal(logits(model), first)
    assert num_packed() == 0
    (path,) = kept_files(tmp_path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_second_load_skips_block_trials(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = num_fused(load(model).module)
    monkeypatch.setattr(block, "_outputs", None)
    assert num_fused(load(model).module) == first > 0


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def open_to_others(path: Path) -> None:
    path.chmod(0o644)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("damage", [flip, cut, empty, open_to_others, link])
def test_untrusted_file_is_a_miss_and_is_replaced(
    damage: Callable[[Path], None], model: str, tmp_path: Path, num_packed: Callable[[], int]
) -> None:
    first = logits(model)
    (path,) = kept_files(tmp_path)
    damage(path)
    num_packed()
    assert np.array_equal(logits(model), first)
    assert num_packed() > 0
    assert np.array_equal(logits(model), first)
    assert num_packed() == 0


def test_file_differs_by_activations_and_weights(model: str, tmp_path: Path) -> None:
    load(model, cpu=CpuOptions(activations=16))
    load(model, cpu=CpuOptions(activations=32))
    assert len(kept_files(tmp_path)) == 2
    write_quantized(Path(model), "qwen3")
    load(model)
    assert len(kept_files(tmp_path)) == 3


def test_limit_deletes_least_recently_read_file(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model, cpu=CpuOptions(activations=16))
    (read,) = kept_files(tmp_path)
    load(model, cpu=CpuOptions(activations=32))
    (unread,) = set(kept_files(tmp_path)) - {read}
    os.utime(unread, (1.0, 1.0))
    monkeypatch.setattr(packed_file, "MAX_BYTES", 5 * read.stat().st_size // 2)
    load(model, cpu=CpuOptions(activations=8))
    assert read in kept_files(tmp_path)
    assert unread not in kept_files(tmp_path)
    assert len(kept_files(tmp_path)) == 2


@pytest.mark.parametrize(("name", "value"), [("MAX_BYTES", 1000), ("FREE_BYTES", 1 << 60)])
def test_no_file_is_written_beyond_a_limit(
    name: str, value: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, name, value)
    load(model)
    assert kept_files(tmp_path) == []


def test_model_above_the_limit_deletes_no_file(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model, cpu=CpuOptions(activations=16))
    (path,) = kept_files(tmp_path)
    monkeypatch.setattr(packed_file, "MAX_BYTES", path.stat().st_size // 2)
    load(model, cpu=CpuOptions(activations=32))
    assert kept_files(tmp_path) == [path]


def test_temporary_file_of_a_killed_process_is_replaced(model: str, tmp_path: Path) -> None:
    load(model)
    (path,) = kept_files(tmp_path)
    path.rename(path.with_suffix(f".{os.getpid()}{packed_file.TEMPORARY}"))
    load(model)
    assert kept_files(tmp_path) == [path]


def test_full_disk_leaves_no_file(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", fail)
    load(model)
    assert kept_files(tmp_path) == []
