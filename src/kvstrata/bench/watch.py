"""What a long measurement tells while it runs: what it does now, and each pass that is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Watch:
    told: Callable[[str], None] = lambda _: None  # hears what comes next
    advanced: Callable[[], None] = lambda: None  # called after each pass
    title: str = ""

    def under(self, title: str) -> Watch:
        return replace(self, title=title)

    def say(self, what: str) -> None:
        self.told(f"{self.title}: {what}" if self.title else what)

    def passed(self, result: T) -> T:
        self.advanced()
        return result


UNWATCHED = Watch()
