"""The BLAS of the process. What depends on the order of imports runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.cli.doctor import mlx_gflops, numpy_gflops
from kvstrata.platform.blas import blas
from kvstrata.platform.device import mlx_backend, usable_cores

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
