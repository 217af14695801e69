"""Which variable of a template switches thinking, found by rendering with it.

Knows the names that templates use. A variable that changes nothing is never set: it would be one more thing that
tells two equal prompts apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.text.template import ChatTemplate

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_EFFORTS = ("none", "minimal", "low", "medium", "high")
_HIGHER = ("xhigh", "max")  # what some clients have above high
_UNKNOWN = "kvstrata-probe"
_USUAL = ("low", "medium", "high")  # what models know whose template takes any word


class ThinkingSwitch:
    """Made once for a model."""

    def __init__(self, template: ChatTemplate) -> None:
        self._switches = tuple(name for name in _SWITCHES if _differs(template, name, (True, False)))
        self._efforts = _known_efforts(template)

    def switch(self, effort: str | None, enabled: bool | None) -> dict[str, Any]:
        """Template variables that have an effect. `effort`: none, minimal, low, medium or high. None: not asked for."""
        effort = "high" if effort in _HIGHER else effort
        if enabled is False or (enabled is None and effort == "none"):
            variables: dict[str, Any] = dict.fromkeys(self._switches, False)
            effort = "none"
        elif enabled or effort in _EFFORTS:
            variables = dict.fromkeys(self._switches, True)
            effort = "minimal" if effort == "none" else effort
        else:
            return {}
        if effort in _EFFORTS and self._efforts and not (effort == "none" and self._switches):
            variables[_EFFORT] = _nearest(effort, self._efforts)
        return variables


def _differs(template: ChatTemplate, name: str, values: tuple[Any, Any]) -> bool:
    texts = [template.shown_with({name: value}) for value in values]
    return all(texts) and texts[0] != texts[1]


def _known_efforts(template: ChatTemplate) -> tuple[str, ...]:
    """The words that the template knows; none, if it does not ask for one."""
    texts = {effort: template.shown_with({_EFFORT: effort}) for effort in (*_EFFORTS, _UNKNOWN)}
    takes_any = _UNKNOWN in texts.pop(_UNKNOWN)
    known = tuple(effort for effort in (_USUAL if takes_any else _EFFORTS) if texts[effort])
    return known if len({texts[effort] for effort in known}) > 1 else ()


def _nearest(effort: str, known: Sequence[str]) -> str:
    """Of two that are as near the higher one."""
    place = _EFFORTS.index(effort)
    return min(known, key=lambda one: (abs(_EFFORTS.index(one) - place), -_EFFORTS.index(one)))
