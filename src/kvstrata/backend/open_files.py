"""How many files this process may have open. mlx-lm sets both limits to numbers of its own as it is imported: here it
is kept from that, and the soft limit is raised instead, as far as the hard one lets it.

Knows `resource` and the one module of mlx-lm that does so. Nothing is ever lowered.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

# For the shards of a large model, a disk cache and some hundred clients. macOS starts processes with 256.
WANTED_OPEN_FILES = 4096
SETS_LIMITS = "mlx_lm.utils"


@dataclass(frozen=True)
class OpenFiles:
    soft: int
    hard: int


def open_files() -> OpenFiles:
    soft, hard = (_number(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return OpenFiles(soft, hard)


def raise_open_files() -> OpenFiles:
    """The soft limit becomes what is wanted, or the hard limit where that is less."""
    now = open_files()
    wanted = min(WANTED_OPEN_FILES, now.hard)
    if now.soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return open_files()


def keep_open_files() -> None:
    """From now on importing mlx-lm changes no limit. To be called before it is imported."""
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
    """Code that sets other limits meanwhile changes nothing and gets no error."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
