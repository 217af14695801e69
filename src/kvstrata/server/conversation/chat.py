"""What any wire's request becomes: turns, tools, what is wanted of the reply. Values only.

Turns are messages as chat templates read them, in OpenAI's words (text/messages.py): every other wire translates into
those, because templates are written for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvstrata.grammar.constraint import Constraint
from kvstrata.text.messages import Message

Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters", ...}}


@dataclass(frozen=True)
class ToolChoice:
    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""  # required: this one; empty: any
    parallel: bool = True  # False: at most one call in a reply


@dataclass(frozen=True)
class ThinkingWanted:
    """None: as the template has it by itself."""

    enabled: bool | None = None
    effort: str | None = None


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a reply, of a chat and of a plain text alike."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of Sampling that the client names
    logit_bias: Mapping[str, float] = field(default_factory=dict)  # by token id
    max_tokens: int | None = None  # None: as long as the context
    reserves: bool = True  # max_tokens must have room in memory; False: it is only a bound
    stop: tuple[str, ...] = ()
    n: int = 1
    constraint: Constraint | None = None
    constraint_param: str = ""  # the field that it came by
    cache_salt: str | None = None
    cache_key: str | None = None  # the client's name for requests that belong together


@dataclass(frozen=True)
class Chat:
    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: ThinkingWanted = field(default_factory=ThinkingWanted)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wanted: Wanted = field(default_factory=Wanted)
    model: str | None = None  # None: the one that is served
