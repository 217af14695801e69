"""Device, cores and memory of the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstrata.platform.device import device, free_memory_bytes, install_command, memory_bytes, usable_cores


def cgroup_tree(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (folder / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "fs" / name).write_text(text)
    (folder / "own").write_text(own)
    return folder / "fs", folder / "own"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{GIB}\n"}, GIB),
        ("0::/a/b\n", {"a/b/memory.max": f"{GIB // 2}\n", "a/memory.max": f"{GIB}\n"}, GIB // 2),
        ("0::/of/the/host\n", {"memory.max": f"{GIB}\n"}, GIB),
        ("4:memory:/a\n1:cpu:/\n0::/\n", {"memory/a/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("0::/a\n", {"b/memory.max": "1\n"}, None),
    ],
)
def test_memory_honours_cgroups(tmp_path: Path, own: str, files: dict[str, str], expected: int | None) -> None:
    import psutil

    limited = memory_bytes(*cgroup_tree(tmp_path, own, files))
    assert limited == (expected or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a\n", {"a/memory.max": "5000\n", "a/memory.current": "3000\n"}, 2000),
        (
            "0::/a\n",
            {"a/memory.max": "5000\n", "a/memory.current": "3000\n", "a/memory.stat": "anon 9\ninactive_file 500\n"},
            2500,
        ),
        ("0::/a\n", {"a/memory.max": "5000\n", "a/memory.current": "6000\n"}, 0),
        (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "5000\n", "memory/a/memory.usage_in_bytes": "1000\n"},
            4000,
        ),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "6000\n"}, None),
    ],
)
def test_free_memory_honours_cgroups(tmp_path: Path, own: str, files: dict[str, str], expected: int | None) -> None:
    import psutil

    free = free_memory_bytes(*cgroup_tree(tmp_path, own, files))
    assert free == expected if expected is not None else 0 < free <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("own", "files", "most"),
    [
        ("0::/a\n", {"a/cpu.max": "100000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
        ("1:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "100000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 1),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
    ],
)
def test_cores_honour_cgroups(tmp_path: Path, own: str, files: dict[str, str], most: int | None) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert usable_cores(*cgroup_tree(tmp_path, own, files)) == (most or cores)


def test_the_device_is_the_one_that_mlx_computes_on() -> None:
    import mlx.core as mx

    here = device()
    assert (here.backend == "cpu") == (mx.default_device() == mx.cpu)
    assert here.name
    assert here.memory_bytes > 1 << 28
    assert here.num_cores == usable_cores()


def test_the_command_is_of_what_installed_it(tmp_path: Path) -> None:
    (tmp_path / "lib" / "python3.12" / "site-packages" / "pip").mkdir(parents=True)
    assert install_command("kvstrata[cpu]", tmp_path).endswith("-m pip install 'kvstrata[cpu]'")
    (tmp_path / "pipx_metadata.json").write_text("{}")
    assert install_command("kvstrata[cpu]", tmp_path) == f"pipx inject {tmp_path.name} 'kvstrata[cpu]'"
    (tmp_path / "pipx_metadata.json").unlink()
    (tmp_path / "uv-receipt.toml").write_text("")
    assert install_command("kvstrata[cpu]", tmp_path) == f"uv pip install --python {tmp_path} 'kvstrata[cpu]'"
