"""Where a GGUF file's folder is: converted when it is first asked for, and found again after that."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvstrata.errors import ModelError
from kvstrata.models.gguf.container import parts_of, read
from kvstrata.models.gguf.convert import convert
from kvstrata.models.made import check_disk, damage_of, make_folder
from kvstrata.models.progress import bar, say
from kvstrata.platform.files import cache_root

FORMAT = 1  # of the converted folder: raise it when convert.py writes something else
# What a folder takes of its file's size, at most: scales of K types grow from 6 bits to 16.
LARGEST_SHARE = 1.4


def folder_of(path: Path) -> Path:
    """Raises ModelError for what cannot be read or converted, before anything is written."""
    made_from = _made_from(path)
    folder = _place(path, made_from)
    damage = damage_of(folder, made_from)
    if not damage:
        return folder
    if folder.exists():
        say(f"{folder} will be made again: {damage}")
    gguf = read(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_disk(folder.parent, int(LARGEST_SHARE * gguf.nbytes), path.name)

    def make(_making: Path, made: Path) -> None:
        with bar(f"Converting {path.name}", gguf.nbytes) as advance:
            convert(gguf, made, advance)

    make_folder(folder, made_from, path.name, make)
    return folder


def converted(path: Path) -> Path | None:
    """Its folder, if it was converted before."""
    made_from = _made_from(path)
    folder = _place(path, made_from)
    return None if damage_of(folder, made_from) else folder


def _place(path: Path, made_from: dict[str, Any]) -> Path:
    digest = hashlib.blake2s(repr(sorted(made_from.items())).encode(), digest_size=6).hexdigest()
    return cache_root() / "models" / "gguf" / f"{path.stem}-{digest}"


def _made_from(path: Path) -> dict[str, Any]:
    """Names, sizes and times: a file that is moved stays the same one, a file that is written anew does not."""
    if not path.is_file():
        raise ModelError(f"There is no file {path}. Check the path.")
    files = [(part.name, part.stat()) for part in parts_of(path)]
    return {"format": FORMAT, "gguf": [[name, status.st_size, status.st_mtime_ns] for name, status in files]}
