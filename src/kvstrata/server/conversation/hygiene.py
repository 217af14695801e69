"""Prompt hygiene: removes or handles text in prompts of agents that would prevent prefix cache hits.

Each rule has a switch and a counter with its name. No rule moves text to the front of a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.text.messages import Message

# Claude Code's billing line: it changes each turn and means nothing to a model.
NONCES = ("x-anthropic-billing-header:",)
SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Hygiene:
    drop_nonces: bool = True
    system_in_place: bool = True  # even if the template would move them (text/tools_in_prompt.py)


@dataclass(frozen=True)
class Tidied:
    messages: list[Message]
    used: Counter[str]  # number of uses of each rule


def tidied(messages: Sequence[Message], rules: Hygiene) -> Tidied:
    used: Counter[str] = Counter()
    out = list(messages)
    if rules.drop_nonces:
        told = [(message, _without_nonces(message, used)) for message in messages]
        out = [after for before, after in told if after is before or after["content"]]
    if rules.system_in_place:
        used["system_in_place"] += _num_later_systems(out)
    return Tidied(out, +used)


def _without_nonces(message: Message, used: Counter[str]) -> Message:
    content = message.get("content")
    if message.get("role") not in SYSTEM or not content:
        return message
    if isinstance(content, str):
        kept = _kept(content, used)
    else:
        texts = [(part, part.get("text")) for part in content]
        told = [part | {"text": _kept(text, used)} if isinstance(text, str) else part for part, text in texts]
        kept = [part for part in told if part.get("text") != ""]
    return message if kept == content else message | {"content": kept}


def _kept(text: str, used: Counter[str]) -> str:
    if not any(nonce in text for nonce in NONCES):
        return text
    lines = text.split("\n")
    kept = [line for line in lines if not line.startswith(NONCES)]
    used["nonce"] += len(lines) - len(kept)
    return "\n".join(kept)


def _num_later_systems(messages: Sequence[Message]) -> int:
    roles = [message.get("role") for message in messages]
    first = next((place for place, role in enumerate(roles) if role not in SYSTEM), len(roles))
    return sum(role in SYSTEM for role in roles[first:])
