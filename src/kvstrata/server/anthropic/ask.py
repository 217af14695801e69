"""Translation of Messages API bodies to conversations. Decides which of the API's fields have no effect here."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.types import Scope

from kvstrata.errors import InvalidRequest
from kvstrata.grammar.constraint import Constraint
from kvstrata.server.anthropic.cache_control import pin_of
from kvstrata.server.anthropic.schema import CountAsked, MessagesAsked, PromptAsked, ToolAsked
from kvstrata.server.anthropic.turns import turns
from kvstrata.server.conversation.body import read_body
from kvstrata.server.conversation.chat import Chat, ThinkingWanted, Tool, ToolChoice, Wanted
from kvstrata.server.conversation.job import Job, chat_job, check_model
from kvstrata.server.conversation.prompt import chat_prompt
from kvstrata.server.service import Service

logger = logging.getLogger("kvstrata.server")

# Prefixes of the types of tools without a schema: the model would have to know them, or Anthropic would run them.
CLIENTS_OWN = ("bash", "text_editor", "computer", "memory", "browser")
ANTHROPICS_OWN = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
OTHER = "other"
# Chat templates know three efforts.
EFFORTS = {"xhigh": "high", "max": "high"}
LEAST_TOP_P = 1e-6  # greedy: only the likeliest token


def read_message(service: Service, body: bytes, scope: Scope) -> tuple[MessagesAsked, Job]:
    asked = read_body(MessagesAsked, body, service.max_items)
    _log_ignored(asked, scope)
    if asked.messages[-1].role == "assistant":
        raise InvalidRequest(
            "messages: the last one is the assistant's, and this server cannot go on in the middle of a reply. End "
            "with a user message.",
            param="messages",
        )
    return asked, chat_job(service, conversation(asked), scope, f"msg_{uuid.uuid4().hex[:24]}")


def count_prompt(service: Service, body: bytes, scope: Scope) -> int:
    """Return the number of tokens of the prompt that /v1/messages would make of the same body."""
    asked = read_body(CountAsked, body, service.max_items)
    check_model(service, asked.model)
    return len(chat_prompt(service, _chat(asked, Wanted()), scope).ids)


def conversation(asked: MessagesAsked) -> Chat:
    """Return the conversation of a request. Raises InvalidRequest for a request that no model can serve here."""
    return replace(_chat(asked, _wanted(asked)), pin=pin_of(asked))


def _chat(asked: PromptAsked, wanted: Wanted) -> Chat:
    tools = _tools(asked.tools or ())
    return Chat(
        messages=turns(asked),
        tools=tools,
        choice=_choice(asked, tools),
        thinking=_thinking(asked),
        wanted=wanted,
        model=asked.model,
    )


def _wanted(asked: MessagesAsked) -> Wanted:
    constraint, param = _constraint(asked)
    top_p = None if asked.top_p is None else max(asked.top_p, LEAST_TOP_P)
    return Wanted(
        sampling={"temperature": asked.temperature, "top_p": top_p, "top_k": asked.top_k},
        max_tokens=asked.max_tokens,
        # Agents send the largest max_tokens of any model, so no memory is reserved for it.
        reserves=False,
        stop=tuple(asked.stop_sequences or ()),
        constraint=constraint,
        constraint_param=param,
        cache_salt=asked.cache_salt,
    )


def _constraint(asked: MessagesAsked) -> tuple[Constraint | None, str]:
    """Return the constraint on the reply and the field that sets it. The API promises valid replies, so a constraint
    that cannot be enforced is refused."""
    config = asked.output_config
    if config and config.format:
        return Constraint.json_schema(config.format.schema_, strict=True), "output_config.format"
    if asked.output_format:
        return Constraint.json_schema(asked.output_format.schema_, strict=True), "output_format"
    return None, ""


def _tools(asked: Sequence[ToolAsked]) -> tuple[Tool, ...]:
    return tuple(_tool(tool, place) for place, tool in enumerate(asked) if not _ignored(tool))


def _tool(tool: ToolAsked, place: int) -> Tool:
    missing = "name" if tool.name is None else "input_schema" if tool.input_schema is None else ""
    if missing:
        raise InvalidRequest(f"tools.{place}.{missing}: a tool needs one.", param=f"tools.{place}.{missing}")
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _ignored(tool: ToolAsked) -> str:
    """Return the family of a tool that has no effect here, or an empty string for a tool that has one."""
    if tool.type in (None, "custom") or tool.input_schema is not None:
        return ""
    return next((family for family in CLIENTS_OWN + ANTHROPICS_OWN if tool.type.startswith(family)), OTHER)


def _log_ignored(asked: PromptAsked, scope: Scope) -> None:
    """Log each ignored tool family once: agents send the same tools with every request."""
    families = {family for tool in asked.tools or () if (family := _ignored(tool))}
    state = scope["app"].state
    told: frozenset[str] = getattr(state, "ignored_tools_told", frozenset())
    for family in sorted(families - told):
        why = "has no schema that a model could be shown" if family in CLIENTS_OWN else "would run at Anthropic"
        logger.info("A client offers a tool of type %s, which %s: the model is not told of it.", family, why)
    state.ignored_tools_told = told | families


def _choice(asked: PromptAsked, tools: Sequence[Tool]) -> ToolChoice:
    choice = asked.tool_choice
    if choice is None:
        return ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("auto", "none"):
        return ToolChoice("none" if choice.type == "none" else "auto", parallel=parallel)
    names = {tool["function"]["name"] for tool in tools}
    if choice.type == "tool" and choice.name not in names:
        raise InvalidRequest(
            f"tool_choice.name: '{(choice.name or '')[:80]}' is not among the tools that this request has a schema of.",
            param="tool_choice.name",
        )
    if not names:
        raise InvalidRequest("tool_choice: 'any' needs tools that have an input_schema.", param="tool_choice")
    return ToolChoice("required", choice.name or "" if choice.type == "tool" else "", parallel)


def _thinking(asked: PromptAsked) -> ThinkingWanted:
    """Return the thinking settings. The token budget is ignored, and thinking is returned even when the client asks to
    omit it: the client sends it back, which keeps the prompt prefix stable."""
    kind = asked.thinking.type if asked.thinking else None
    if kind == "disabled":
        return ThinkingWanted(enabled=False)
    effort = asked.output_config.effort if asked.output_config else None
    return ThinkingWanted(enabled=True if kind == "enabled" else None, effort=EFFORTS.get(effort or "", effort))
