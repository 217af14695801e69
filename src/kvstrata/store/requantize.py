"""A change of precision of what is cached: what is asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["all", "live", "stored", "disk"]


@dataclass(frozen=True)
class Change:
    """What to do. Names as in codecs/registry.py; None leaves K or V as it is."""

    k: str | None = None
    v: str | None = None
    scope: Scope = "all"
    salt: str | None = None  # only what is under this salt
    sequence: str | None = None  # only what this running request holds
    dry_run: bool = False
    force: bool = False  # decode what is lower, though that brings no precision back


@dataclass(frozen=True)
class LeftAlone:
    reason: str
    spans: int
    nbytes: int


@dataclass(frozen=True)
class Changed:
    k: str  # the target from now on
    v: str
    dry_run: bool
    spans: int
    bytes_before: int
    bytes_after: int  # expected, while the work is not done
    left_alone: tuple[LeftAlone, ...]
    expected_error: float  # of scores, relative, measured on a sample; 0 where nothing changes
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Of the last change that was asked for."""

    spans_total: int = 0
    spans_done: int = 0
    bytes_freed: int = 0
    is_running: bool = False
