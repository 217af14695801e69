"""Findings of `kvstrata doctor` and its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.cli.doctor import MachineReport, doctor, judge
from kvstrata.platform.blas import Blas, blas
from kvstrata.platform.device import Device, device
from kvstrata.platform.files import OpenFiles
from kvstrata.platform.memory import Heap

GOOD = MachineReport(
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
def test_doctor_names_what_is_wrong(report: MachineReport, expected: list[str]) -> None:
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
