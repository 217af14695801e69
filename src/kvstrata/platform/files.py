"""Files of the process: the cache folder, facts remembered in it, files with secrets, the limit of open files."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import resource
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

OPEN_TO_ALL = stat.S_IROTH | stat.S_IWOTH
# For the shards of a large model, a disk cache and some hundred clients. macOS starts processes with 256.
WANTED_OPEN_FILES = 4096
SETS_LIMITS = "mlx_lm.utils"


def cache_root() -> Path:
    """Return the folder of files that can be made again: KVSTRATA_HOME or the user's cache folder. Creates nothing."""
    if home := os.environ.get("KVSTRATA_HOME"):
        return Path(home).expanduser().absolute()
    # Imported late: it costs as much as the rest of `import kvstrata`.
    from platformdirs import user_cache_path

    return user_cache_path("kvstrata", appauthor=False)


def make_writable(folder: Path) -> None:
    """Create a folder for its owner alone, unless it is there, and write to it once. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"kvstrata")
        probe.flush()


def read_notes(name: str) -> dict[str, Any]:
    """Return facts that `write_notes` has kept in the cache folder: empty if the file is missing or damaged."""
    try:
        value = json.loads((cache_root() / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_notes(name: str, notes: dict[str, Any]) -> None:
    """Keep facts that take long to find out. Without room or permission the next start finds them out again.

    The file is replaced by a rename: of two processes the later wins.
    """
    target = cache_root() / f"{name}.json"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f"{name}-", delete=False) as file:
            json.dump(notes, file)
        os.replace(file.name, target)
    except OSError:
        return


class OpenToAll(Exception):
    """A file with secrets can be read or written by every user."""


def read_private(path: Path) -> bytes:
    """Return the content of a file with keys or secrets. Raises OSError and OpenToAll."""
    with path.expanduser().open("rb") as file:
        # fstat, because the path may name another file by now.
        if os.fstat(file.fileno()).st_mode & OPEN_TO_ALL:
            raise OpenToAll
        return file.read()


@dataclass(frozen=True)
class OpenFiles:
    soft: int
    hard: int


def open_files() -> OpenFiles:
    soft, hard = (_number(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return OpenFiles(soft, hard)


def raise_open_files() -> OpenFiles:
    """Raise the soft limit to WANTED_OPEN_FILES, or to the hard limit where that is less. Never lowers it."""
    now = open_files()
    wanted = min(WANTED_OPEN_FILES, now.hard)
    if now.soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return open_files()


def keep_open_files() -> None:
    """Keep mlx-lm from setting both limits when it is imported. To be called before that."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != SETS_LIMITS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with _limits_kept():
            super().exec_module(module)


@contextmanager
def _limits_kept() -> Iterator[None]:
    """Turn `setrlimit` into a call that does nothing meanwhile."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
