"""BLAS, device, cores and memory. What depends on the order of imports runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.backend import (
    Blas,
    Device,
    blas,
    cache_root,
    device,
    free_memory_bytes,
    memory_bytes,
    mlx_backend,
    usable_cores,
)
from kvstrata.backend.heap import Heap
from kvstrata.backend.open_files import OpenFiles
from kvstrata.backend.speed import mlx_gflops, numpy_gflops
from kvstrata.cli.doctor import Report, doctor, judge

on_linux_cpu = pytest.mark.skipif(mlx_backend() != "cpu", reason="only MLX's CPU back-end on Linux needs a BLAS")

SAY_BLAS = (
    "import json, kvstrata; b = kvstrata.blas(); print(json.dumps([b.name, str(b.path), b.reason, b.num_threads]))"
)


def start_python(code: str, **environment: object) -> subprocess.Popen[str]:
    changed = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.Popen(command, env=changed, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def result_of(process: subprocess.Popen[str]) -> list:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def blas_in_new_process(code: str = SAY_BLAS, **environment: object) -> list:
    return result_of(start_python(code, **environment))


@on_linux_cpu
def test_mlx_reaches_at_least_half_of_numpys_rate() -> None:
    # Interleaved and best of: other processes of the machine then slow both alike.
    through_mlx, in_numpy = zip(*[(mlx_gflops(), numpy_gflops()) for _ in range(4)], strict=True)
    assert blas().name == "openblas"
    assert max(through_mlx) >= 0.5 * max(in_numpy)


@on_linux_cpu
def test_the_library_is_the_one_that_the_process_has_mapped() -> None:
    assert str(blas().path) in Path("/proc/self/maps").read_text()


@on_linux_cpu
def test_after_mlx_it_is_too_late_and_the_reason_says_so() -> None:
    name, _, reason, _ = blas_in_new_process(f"import mlx.core; {SAY_BLAS}")
    assert name == "reference"
    assert "import kvstrata first" in reason


@on_linux_cpu
@pytest.mark.parametrize(
    ("choice", "expected"),
    [("off", "KVSTRATA_BLAS=off"), ("/nowhere/libblas.so", "/nowhere/libblas.so"), ("libm.so.6", "cblas_sgemm")],
)
def test_a_choice_that_gives_no_blas_is_explained(choice: str, expected: str) -> None:
    name, _, reason, _ = blas_in_new_process(KVSTRATA_BLAS=choice)
    assert name == "reference"
    assert expected in reason


@on_linux_cpu
def test_a_named_library_is_used(tmp_path: Path) -> None:
    named = tmp_path / "mine.so"
    named.write_bytes(Path(str(blas().path)).read_bytes())
    name, path, _, _ = blas_in_new_process(KVSTRATA_BLAS=named)
    assert (name, path) == ("openblas", str(named))


@on_linux_cpu
def test_processes_that_race_make_one_whole_copy(tmp_path: Path) -> None:
    racers = [start_python(SAY_BLAS, KVSTRATA_HOME=tmp_path) for _ in range(3)]
    answers = [result_of(racer) for racer in racers]
    assert {name for name, *_ in answers} == {"openblas"}
    assert len({path for _, path, *_ in answers}) == 1
    assert [path.suffix for path in (tmp_path / "blas").iterdir()] == [".so"]


@on_linux_cpu
@pytest.mark.parametrize("keep_bytes", [0, 1000, 20_000_000])
def test_a_damaged_copy_is_made_again(tmp_path: Path, keep_bytes: int) -> None:
    whole = Path(str(blas().path))
    damaged = tmp_path / "blas" / whole.name
    damaged.parent.mkdir()
    damaged.write_bytes(whole.read_bytes()[:keep_bytes])
    name, path, _, _ = blas_in_new_process(KVSTRATA_HOME=tmp_path)
    assert (name, path) == ("openblas", str(damaged))
    assert damaged.read_bytes() == whole.read_bytes()


@on_linux_cpu
def test_a_cache_folder_that_cannot_be_written_does_not_break_the_import() -> None:
    name, _, reason, _ = blas_in_new_process(KVSTRATA_HOME="/dev/null/here")
    # A system OpenBLAS may step in; without one the reason names what went wrong.
    assert name == "openblas" or "/dev/null/here" in reason


@on_linux_cpu
def test_the_users_number_of_threads_stays() -> None:
    assert blas_in_new_process(OPENBLAS_NUM_THREADS=1)[3] == 1
    assert blas_in_new_process()[3] == usable_cores()


def test_importing_kvstrata_does_not_import_mlx() -> None:
    code = "import json, sys, kvstrata; print(json.dumps([name for name in sys.modules if name.startswith('mlx')]))"
    assert blas_in_new_process(code) == []


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


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "elsewhere"))
    assert cache_root() == tmp_path / "elsewhere"
    monkeypatch.delenv("KVSTRATA_HOME")
    assert cache_root().name == "kvstrata"


GOOD = Report(
    device=Device("cuda", "a GPU", 80 << 30, 8, 80 << 30),
    blas=Blas("none needed", "", None, "cuda", 1),
    mlx_gflops=9000.0,
    numpy_gflops=100.0,
    memory_available_bytes=60 << 30,
    cache_folder=Path("/cache"),
    disk_free_bytes=100 << 30,
    default_model=True,
    kernels=(),
    versions={},
    heap=Heap("glibc", "at once"),
    open_files=OpenFiles(1024, 4096),
)
SLOW_CPU = replace(
    GOOD,
    device=Device("cpu", "x", 8 << 30, 2, 8 << 30),
    blas=Blas("reference", "", None, "too late", 1),
    mlx_gflops=2.0,
)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (GOOD, []),
        (SLOW_CPU, ["Matrix products are slow"]),
        (replace(GOOD, open_files=OpenFiles(256, 512)), ["Few open files"]),
        (
            replace(SLOW_CPU, heap=Heap("other", "as it likes")),
            ["Matrix products are slow", "Freed memory may stay with the process"],
        ),
        (replace(SLOW_CPU, mlx_gflops=60.0), ["The model runs on the CPU"]),
        (replace(GOOD, memory_available_bytes=1 << 30, disk_free_bytes=1), ["Little memory", "Little disk space"]),
        (replace(GOOD, default_model=False), ["The default model is not here"]),
        (replace(GOOD, weights="stay packed, multiplied by sdot"), []),
        (replace(GOOD, weights="become float32: numba is missing"), ["Weights become float32"]),
    ],
)
def test_doctor_names_what_is_wrong(report: Report, expected: list[str]) -> None:
    assert [finding.what for finding in judge(report)] == expected


def test_doctor_says_why_products_are_slow() -> None:
    [finding] = judge(SLOW_CPU)
    assert "reference (too late)" in finding.why
    assert "kvstrata[cpu]" in finding.next_step


def test_doctor_prints_one_json_value(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["blas"]["name"] == blas().name
    assert report["mlx_gflops"] > 0
    assert report["disk_free_bytes"] > 0


def test_doctor_for_people_shows_extras_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    doctor()
    shown = capsys.readouterr().out
    assert blas().name in shown
    assert device().backend in shown
    assert device().backend != "cpu" or "kvstrata[" in shown
