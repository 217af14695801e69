"""Faults of the prefix cache on purpose: each public operation of its parts raises once, at one of its call sites."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from kvstrata import prefix_cache
from kvstrata.grammar.compiler import Grammar
from kvstrata.grammar.matcher import Matcher, TokenMasks
from kvstrata.prefix_cache.jobs import FailureLog
from kvstrata.tiers.disk.chains import DiskChains
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.remote.chains import RemoteChains
from kvstrata.tiers.remote.tier import RemoteTier


class Fault(Exception):
    """Raised by the test alone."""


class Site(NamedTuple):
    """A place in the code that calls an operation."""

    operation: str
    file: str
    line: int


@dataclass
class Plan:
    """`at`: the call that raises; None: none does. `seen` counts the calls of each site."""

    at: tuple[Site, int] | None
    seen: Counter[Site]
    has_raised: bool = False

    def call(self, operation: str) -> None:
        caller = sys._getframe(2)
        site = Site(operation, caller.f_code.co_filename.rpartition("kvstrata/")[2], caller.f_lineno)
        self.seen[site] += 1
        if self.at == (site, self.seen[site]) and not self.has_raised:
            self.has_raised = True
            raise Fault(f"call {self.seen[site]} of {operation} at {site.file}:{site.line}")


class Faults:
    def __init__(self) -> None:
        self._plan = Plan(None, Counter())

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the plan see each call of a public operation, and each reading of a public property."""
        for of in _parts():
            for name, operation in list(vars(of).items()):
                if name.startswith("_"):
                    continue
                if inspect.isfunction(operation):
                    monkeypatch.setattr(of, name, self._watched(operation))
                elif isinstance(operation, property) and operation.fget is not None:
                    monkeypatch.setattr(of, name, property(self._watched(operation.fget)))

    def _watched(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        name = operation.__qualname__

        @wraps(operation)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._plan.call(name)
            return operation(*args, **kwargs)

        return call

    @contextmanager
    def planned(self, at: tuple[Site, int] | None) -> Iterator[Plan]:
        self._plan = Plan(at, Counter())
        try:
            yield self._plan
        finally:
            self._plan = Plan(None, Counter())


def _parts() -> Iterator[type]:
    """All that work on what is stored: the cache, a tier, precision and grammars; not the guard itself, nor values."""
    modules: list[ModuleType] = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(prefix_cache.__path__, "kvstrata.prefix_cache.")
    ]
    for module in modules:
        for _, of in inspect.getmembers(module, inspect.isclass):
            if of.__module__ == module.__name__ and of is not FailureLog and not is_dataclass(of):
                yield of
    yield from (DiskTier, DiskChains, RemoteTier, RemoteChains, Matcher, TokenMasks, Grammar)
