"""Grammars for replies: the client's constraint, a required tool call, or both.

Combines constraints and compiles them, in the form in which the model writes calls (`ReplyFormat.call_text`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvstrata.errors import InvalidRequest, QueueFull
from kvstrata.grammar.compiler import Grammar
from kvstrata.grammar.constraint import Constraint
from kvstrata.grammar.tool_grammar import CallForm, tool_call_grammar
from kvstrata.server.conversation.chat import Chat, Tool
from kvstrata.server.service import Service


def grammar_of(service: Service, chat: Chat, salt: str, *, after_thinking: bool, thinks_unseen: bool) -> Grammar | None:
    """Return the grammar of the reply, or None if it is unconstrained. `thinks_unseen`: the reply begins with thinking,
    and no token marks its end."""
    if chat.choice.mode == "required":
        return _required(service, chat, salt)
    constraint, tools = chat.wanted.constraint, chat.tools if chat.choice.mode == "auto" else ()
    if constraint is None:
        is_told = bool(tools) and not service.form.shows_tools and not thinks_unseen
        return _told(service, tools, salt, several=chat.choice.parallel) if is_told else None
    if tools and not service.form.has_channels:
        forms = _forms(service, tools)
        constraint = _calls(
            service, forms, chat.wanted.constraint_param, several=chat.choice.parallel, otherwise=constraint
        )
    elif after_thinking:
        constraint = replace(constraint, padded=True)
    return service.grammars.compile(constraint, salt=salt, param=chat.wanted.constraint_param)


def _required(service: Service, chat: Chat, salt: str) -> Grammar:
    if chat.wanted.constraint is not None:
        raise InvalidRequest(
            f"{chat.wanted.constraint_param}: not together with a tool_choice that requires a call: the reply is then "
            "that call.",
            param=chat.wanted.constraint_param,
        )
    name = chat.choice.name
    tools = [tool for tool in chat.tools if not name or tool["function"]["name"] == name]
    constraint = _calls(service, _forms(service, tools), "tools", several=chat.choice.parallel and not name)
    try:
        return service.grammars.compile(constraint, salt=salt, param="tools")
    except InvalidRequest as error:
        message = f"A call to one of {len(tools)} tools cannot be required. {error.message}"
        raise InvalidRequest(message, param="tools") from error


def _told(service: Service, tools: Sequence[Tool], salt: str, *, several: bool) -> Grammar | None:
    """Return the grammar for a model whose template has no tools: a reply that begins like a call must be one."""
    try:
        constraint = _calls(service, _forms(service, tools), "tools", several=several, or_text=True)
        return service.grammars.compile(constraint, salt=salt, param="tools")
    except (InvalidRequest, QueueFull):
        # The client asked for no grammar, so this one is optional: the model may write a call without it.
        return None


def _calls(service: Service, forms: Sequence[CallForm], param: str, **options: Any) -> Constraint:
    try:
        return tool_call_grammar(forms, service.grammars.pieces, **options)
    except ValueError as error:
        raise InvalidRequest(f"{param}: cannot be used: {error}.", param=param) from error


def _forms(service: Service, tools: Sequence[Tool]) -> list[CallForm]:
    forms: list[CallForm] = []
    for tool in tools:
        function = tool["function"]
        before, after = service.form.call_text(function["name"]) or _bare(function["name"])
        forms.append((before, function.get("parameters") or {"type": "object"}, after))
    return forms


def _bare(name: str) -> tuple[str, str]:
    """Return the plain JSON form of a call, for a template whose own form is not JSON. The reply parsers accept it
    too."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}"
