"""A request in the terms of every API: messages, tools and parameters of the reply. Values only.

Messages are in OpenAI's form, as chat templates read them (text/messages.py); the other APIs translate to it, because
templates are written for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
class ThinkingParams:
    """Thinking settings of a request. None: the template's default."""

    enabled: bool | None = None
    effort: str | None = None


@dataclass(frozen=True)
class GenerationParams:
    """Settings of a reply, for chats and plain completions."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of Sampling that the client sets
    logit_bias: Mapping[str, float] = field(default_factory=dict)  # by token id
    max_tokens: int | None = None  # None: up to the end of the context
    reserves: bool = True  # memory is reserved for max_tokens; False: it is only a bound
    stop: tuple[str, ...] = ()
    n: int = 1
    constraint: Constraint | None = None
    constraint_param: str = ""  # the request field that sets it
    cache_salt: str | None = None
    cache_key: str | None = None  # the client's name for the session


@dataclass(frozen=True)
class PinParams:
    """A pin that a request asks for: the whole prompt, or its system messages and tools, for `ttl_s` seconds."""

    ttl_s: float
    up_to: Literal["system", "prompt"]


RETENTIONS_S = {"24h": 86400.0}  # OpenAI's prompt_cache_retention; other values have no effect


def pin_for_retention(retention: str | None) -> PinParams | None:
    ttl_s = RETENTIONS_S.get(retention or "")
    return PinParams(ttl_s, "prompt") if ttl_s else None


@dataclass(frozen=True)
class ChatRequest:
    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: ThinkingParams = field(default_factory=ThinkingParams)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    params: GenerationParams = field(default_factory=GenerationParams)
    model: str | None = None  # None: the served model
    pin: PinParams | None = None

    @property
    def tools_in_prompt(self) -> tuple[Tool, ...]:
        """Return the tools that the model is shown; none if it must not call any."""
        return () if self.choice.mode == "none" else self.tools


@dataclass(frozen=True)
class TextRequest:
    """Prompts without a chat template: texts or token ids."""

    prompts: Sequence[str | Sequence[int]]
    params: GenerationParams
    model: str | None = None
