"""Machine code of CUDA kernels, which needs no GPU: made once, and never taken from a damaged file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstrata.platform import cuda_compiler

TEXT = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n'

pytestmark = pytest.mark.skipif(cuda_compiler.library() is None, reason="needs nvidia-cuda-nvrtc, -runtime and -cccl")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures for which something was compiled."""
    assert not folder.exists()
    done: list[str] = []
    real = cuda_compiler.machine_code

    def machine_code(text: str, architecture: str) -> bytes:
        done.append(architecture)
        return real(text, architecture)

    monkeypatch.setattr(cuda_compiler, "machine_code", machine_code)
    return done


def test_it_is_compiled_once_for_an_architecture(compiled: list[str]) -> None:
    first = cuda_compiler.kept_machine_code(TEXT, "sm_90")
    assert first.startswith(b"\x7fELF")
    assert b"twice" in first
    assert cuda_compiler.kept_machine_code(TEXT, "sm_90") == first
    assert cuda_compiler.kept_machine_code(TEXT, "sm_80") != first
    assert cuda_compiler.kept_machine_code(TEXT.replace("2", "3"), "sm_90") != first
    assert compiled == ["sm_90", "sm_80", "sm_90"]


@pytest.mark.parametrize("damage", ["empty", "short", "one byte less", "another byte"])
def test_a_damaged_file_is_made_again(folder: Path, compiled: list[str], damage: str) -> None:
    first = cuda_compiler.kept_machine_code(TEXT, "sm_90")
    (file,) = folder.iterdir()
    data = file.read_bytes()
    middle = len(data) // 2
    damaged = {
        "empty": b"",
        "short": data[:10],
        "one byte less": data[:-1],
        "another byte": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
    }
    file.write_bytes(damaged[damage])
    assert cuda_compiler.kept_machine_code(TEXT, "sm_90") == first
    assert cuda_compiler.kept_machine_code(TEXT, "sm_90") == first
    assert len(compiled) == 2


def test_what_no_start_has_read_for_long_goes(folder: Path, compiled: list[str]) -> None:
    long_ago = time.time() - 100 * 24 * 3600
    cuda_compiler.kept_machine_code(TEXT, "sm_80")
    (read,) = folder.iterdir()
    cuda_compiler.kept_machine_code(TEXT, "sm_86")
    unread = next(file for file in folder.iterdir() if file != read)
    for file in (read, unread):
        os.utime(file, (long_ago, long_ago))
    cuda_compiler.kept_machine_code(TEXT, "sm_80")
    cuda_compiler.kept_machine_code(TEXT, "sm_90")
    assert read.exists()
    assert not unread.exists()
    assert compiled == ["sm_80", "sm_86", "sm_90"]


def test_a_folder_that_cannot_be_made_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "file"))
    assert cuda_compiler.kept_machine_code(TEXT, "sm_90") == cuda_compiler.kept_machine_code(TEXT, "sm_90")
    assert len(compiled) == 2


def test_the_compiler_tells_what_is_wrong(folder: Path) -> None:
    with pytest.raises(cuda_compiler.CompileError, match="factor"):
        cuda_compiler.kept_machine_code(TEXT.replace("2", "factor"), "sm_90")
    with pytest.raises(cuda_compiler.CompileError, match="gpu-architecture"):
        cuda_compiler.kept_machine_code(TEXT, "sm_1")
    assert not folder.exists()
    with pytest.raises(cuda_compiler.CompileError, match="factor"):
        cuda_compiler.assembly(TEXT.replace("2", "factor"))
    assert ".entry twice(" in cuda_compiler.assembly(TEXT)


def test_another_users_folder_is_read(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    cuda_compiler.kept_machine_code(TEXT, "sm_90")
    monkeypatch.setattr(cuda_compiler.os, "utime", refuse)
    cuda_compiler.kept_machine_code(TEXT, "sm_90")
    assert len(compiled) == 1


def test_a_full_disk_leaves_nothing_behind(folder: Path) -> None:
    """A process of its own may write files of 1,000 bytes at most."""
    code = f"""
import resource, signal
from kvstrata.platform import cuda_compiler
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
assert len(cuda_compiler.kept_machine_code({TEXT!r}, "sm_90")) > 1000
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert not list(folder.iterdir())


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_library_that_is_loaded_already_is_taken(tmp_path: Path) -> None:
    for version in (12, 13):
        library, soname = tmp_path / f"libnvrtc.so.{version}", f"-Wl,-soname,libnvrtc.so.{version}"
        subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", soname, "-o", str(library)], check=True)
    code = f"""
import ctypes
ctypes.CDLL({str(tmp_path / "libnvrtc.so.12")!r})
from kvstrata.platform import cuda_compiler
print(cuda_compiler.library()._name)
"""
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert run.stdout == "libnvrtc.so.12\n"
