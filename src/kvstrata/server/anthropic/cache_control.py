"""`cache_control` with a ttl, translated to a pin of the prompt.

Without a ttl it has no effect, because every prompt is cached: agents set it on blocks in every request. An unknown
form is ignored and never refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvstrata.server.anthropic.schema import MessagesAsked, TurnAsked
from kvstrata.server.conversation.chat import PinWanted

TTLS_S = {"5m": 300.0, "1h": 3600.0}


def pin_of(asked: MessagesAsked) -> PinWanted | None:
    """Return the pin that the last block with a ttl asks for. A ttl inside the messages pins the whole prompt: the
    token position of a block's end is unknown, and the next turn reuses the whole prompt."""
    in_messages = _last_ttl([*(each for turn in asked.messages for each in _blocks(turn)), asked])
    if in_messages:
        return PinWanted(in_messages, "prompt")
    system = asked.system if isinstance(asked.system, list) else ()
    before = _last_ttl([*(asked.tools or ()), *system])
    return PinWanted(before, "system") if before else None


def _blocks(turn: TurnAsked) -> Iterator[Any]:
    for block in turn.content if isinstance(turn.content, list) else ():
        yield block
        inner = getattr(block, "content", None)
        yield from inner if isinstance(inner, list) else ()


def _last_ttl(marked: Iterable[Any]) -> float:
    """Return the last ttl in seconds, or 0 if there is none."""
    ttls = [ttl for each in marked if (ttl := _ttl_s(each.cache_control))]
    return ttls[-1] if ttls else 0.0


def _ttl_s(control: Any) -> float:
    ttl = control.get("ttl") if isinstance(control, dict) else None
    return TTLS_S.get(ttl, 0.0) if isinstance(ttl, str) else 0.0
