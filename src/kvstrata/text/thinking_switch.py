"""Which variable of a template switches thinking, found by rendering with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.text.template import ChatTemplate


class ThinkingSwitch:
    """Made once for a model."""

    def __init__(self, template: ChatTemplate) -> None: ...

    def switch(self, effort: str | None, enabled: bool | None) -> dict[str, Any]:
        """Template variables that have an effect. `effort`: none, minimal, low, medium or high."""
        raise NotImplementedError
