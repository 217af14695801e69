"""Translation of Messages API bodies to chats. Decides which of the API's fields have no effect here.

The order of blocks is preserved: a cached prefix is only useful if the start of the prompt is stable. `cache_control`
without a ttl has no effect, because every prompt is cached; an unknown form is ignored and never refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from kvstrata.errors import InvalidRequest
from kvstrata.grammar.constraint import Constraint
from kvstrata.server.anthropic.schema import (
    Block,
    DocumentBlock,
    MessagesPrompt,
    MessagesRequest,
    OfferedTool,
    OtherBlock,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)
from kvstrata.server.chat.request import ChatRequest, GenerationParams, PinParams, ThinkingParams, Tool, ToolChoice
from kvstrata.text.messages import Message

PLACES: dict[str, tuple[type, ...]] = {
    "user": (TextBlock, DocumentBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock, ToolChangeBlock),
    "tool_result": (TextBlock, DocumentBlock, ToolReferenceBlock),
}

Placed = tuple[str, Block]  # a block and where it stands: messages.0.content.1
TTLS_S = {"5m": 300.0, "1h": 3600.0}
# Prefixes of the types of tools without a schema: the model would have to know them, or Anthropic would run them.
CLIENTS_OWN = ("bash", "text_editor", "computer", "memory", "browser")
ANTHROPICS_OWN = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
OTHER = "other"
# Chat templates know three efforts.
EFFORTS = {"xhigh": "high", "max": "high"}
LEAST_TOP_P = 1e-6  # greedy: only the likeliest token


def turns(asked: MessagesPrompt) -> list[Message]:
    """Return the messages for the chat template. Raises InvalidRequest with the position of an unsupported block."""
    system = _system_text(_placed(asked.system, "system", "system"))
    out: list[Message] = [{"role": "system", "content": system}] if system else []
    known: set[str] = set()  # ids of calls so far
    numbered = enumerate(asked.messages)
    for role, run in groupby(numbered, key=lambda pair: pair[1].role):
        if role == "system":
            texts = (_system_text(_blocks(turn, place)) for place, turn in run)
            out += [{"role": "system", "content": text} for text in texts if text]
        else:
            # Consecutive messages of one role are one turn in this API; many templates refuse them unmerged.
            blocks = [each for place, turn in run for each in _blocks(turn, place)]
            out += [_assistant(blocks, known)] if role == "assistant" else _user(blocks, known)
    return out


def _blocks(turn: TurnMessage, place: int) -> list[Placed]:
    where = f"messages.{place}.content"
    if turn.content is None and turn.role != "system":
        raise InvalidRequest(f"{where}: a {turn.role} message needs content.", param=where)
    return _placed(turn.content, where, turn.role)


def _placed(content: str | Sequence[Block] | None, where: str, role: str) -> list[Placed]:
    if content is None:
        return []
    if isinstance(content, str):
        return [(where, TextBlock(type="text", text=content))]
    placed = [(f"{where}.{place}", block) for place, block in enumerate(content)]
    for path, block in placed:
        if not isinstance(block, PLACES[role]):
            raise _refusal(path, block, role)
    return placed


def _refusal(path: str, block: Block, role: str) -> InvalidRequest:
    if isinstance(block, OtherBlock):
        kind = block.type[:80]
        if kind == "image":
            return InvalidRequest(f"{path}: images are not supported; this server takes text. Remove it.", param=path)
        return InvalidRequest(f"{path}: a block of type '{kind}' is not supported by this server.", param=path)
    owner = "the result of a tool" if role == "tool_result" else f"a message of role {role}"
    return InvalidRequest(f"{path}: a block of type '{block.type}' has no place in {owner}.", param=path)


def _system_text(blocks: Iterable[Placed]) -> str:
    texts = []
    for path, block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolChangeBlock) and block.tool.get("type") == "tool_definition":
            raise InvalidRequest(
                f"{path}: a tool cannot be defined in the middle of a chat. Put it into tools.", param=path
            )
        # Changes that refer to a tool are ignored: all of `tools` is offered from the start to the end.
    return "\n".join(text for text in texts if text)


def _user(blocks: Sequence[Placed], known: set[str]) -> list[Message]:
    """Return the messages of a user turn. Tool results come first: templates expect them right after the calls."""
    out: list[Message] = [_result(path, block, known) for path, block in blocks if isinstance(block, ToolResultBlock)]
    text = "\n".join(_texts((path, block) for path, block in blocks if not isinstance(block, ToolResultBlock)))
    if text or not out:
        out.append({"role": "user", "content": text})
    return out


def _result(path: str, block: ToolResultBlock, known: set[str]) -> Message:
    if block.tool_use_id not in known:
        raise InvalidRequest(
            f"{path}.tool_use_id: '{block.tool_use_id[:80]}' is the id of no tool_use block before it. Send the call "
            "along with its result.",
            param=f"{path}.tool_use_id",
        )
    text = _result_text(block.content, f"{path}.content")
    # Chat templates have no error flag, so the text carries it.
    shown = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": shown}


def _result_text(content: str | Sequence[ResultBlock] | None, where: str) -> str:
    return "\n".join(_texts(_placed(content, where, "tool_result")))


def _texts(blocks: Iterable[Placed]) -> Iterator[str]:
    for path, block in blocks:
        if isinstance(block, TextBlock):
            yield block.text
        elif isinstance(block, DocumentBlock):
            yield _document(path, block)
        elif isinstance(block, ToolReferenceBlock):
            yield f"The tool {block.tool_name} is available."


def _document(path: str, block: DocumentBlock) -> str:
    data = block.source.get("data")
    if block.source.get("type") != "text" or not isinstance(data, str):
        raise InvalidRequest(
            f"{path}: of documents this server reads plain text only, as a source of type text. Send its text.",
            param=path,
        )
    return f"{block.title}\n{data}" if block.title else data


def _assistant(blocks: Sequence[Placed], known: set[str]) -> Message:
    calls = [block for _, block in blocks if isinstance(block, ToolUseBlock)]
    known.update(call.id for call in calls)
    # Joined without a separator: they are pieces of one reply, split at thinking or calls.
    text = "".join(block.text for _, block in blocks if isinstance(block, TextBlock))
    thinking = "\n".join(block.thinking for _, block in blocks if isinstance(block, ThinkingBlock) and block.thinking)
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(block: ToolUseBlock) -> Message:
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def pin_from_cache_control(asked: MessagesRequest) -> PinParams | None:
    """Return the pin that the last block with a ttl asks for. A ttl inside the messages pins the whole prompt: the
    token position of a block's end is unknown, and the next turn reuses the whole prompt."""
    in_messages = _last_ttl([*(each for turn in asked.messages for each in _cacheable_blocks(turn)), asked])
    if in_messages:
        return PinParams(in_messages, "prompt")
    system = asked.system if isinstance(asked.system, list) else ()
    before = _last_ttl([*(asked.tools or ()), *system])
    return PinParams(before, "system") if before else None


def _cacheable_blocks(turn: TurnMessage) -> Iterator[Any]:
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


def parse_messages(asked: MessagesRequest) -> ChatRequest:
    """Return the chat of a request. Raises InvalidRequest for a request that no model can serve here."""
    if asked.messages[-1].role == "assistant":
        raise InvalidRequest(
            "messages: the last one is the assistant's, and this server cannot go on in the middle of a reply. End "
            "with a user message.",
            param="messages",
        )
    return replace(parse_prompt(asked, _params(asked)), pin=pin_from_cache_control(asked))


def parse_prompt(asked: MessagesPrompt, params: GenerationParams) -> ChatRequest:
    """Return the chat of a request whose parameters are known."""
    tools = _tools(asked.tools or ())
    return ChatRequest(
        messages=turns(asked),
        tools=tools,
        choice=_choice(asked, tools),
        thinking=_thinking(asked),
        params=params,
        model=asked.model,
    )


def _params(asked: MessagesRequest) -> GenerationParams:
    constraint, param = _constraint(asked)
    top_p = None if asked.top_p is None else max(asked.top_p, LEAST_TOP_P)
    return GenerationParams(
        sampling={"temperature": asked.temperature, "top_p": top_p, "top_k": asked.top_k},
        max_tokens=asked.max_tokens,
        # Agents send the largest max_tokens of any model, so no memory is reserved for it.
        reserves=False,
        stop=tuple(asked.stop_sequences or ()),
        constraint=constraint,
        constraint_param=param,
        cache_salt=asked.cache_salt,
    )


def _constraint(asked: MessagesRequest) -> tuple[Constraint | None, str]:
    """Return the constraint on the reply and the field that sets it. The API promises valid replies, so a constraint
    that cannot be enforced is refused."""
    config = asked.output_config
    if config and config.format:
        return Constraint.json_schema(config.format.schema_, strict=True), "output_config.format"
    if asked.output_format:
        return Constraint.json_schema(asked.output_format.schema_, strict=True), "output_format"
    return None, ""


def _tools(asked: Sequence[OfferedTool]) -> tuple[Tool, ...]:
    return tuple(_tool(tool, place) for place, tool in enumerate(asked) if not _ignored(tool))


def _tool(tool: OfferedTool, place: int) -> Tool:
    missing = "name" if tool.name is None else "input_schema" if tool.input_schema is None else ""
    if missing:
        raise InvalidRequest(f"tools.{place}.{missing}: a tool needs one.", param=f"tools.{place}.{missing}")
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _ignored(tool: OfferedTool) -> str:
    """Return the family of a tool that has no effect here, or an empty string for a tool that has one."""
    if tool.type in (None, "custom") or tool.input_schema is not None:
        return ""
    return next((family for family in CLIENTS_OWN + ANTHROPICS_OWN if tool.type.startswith(family)), OTHER)


def ignored_tools(asked: MessagesPrompt) -> dict[str, str]:
    """Return the families of tools that have no effect here, each with the reason."""
    families = {family for tool in asked.tools or () if (family := _ignored(tool))}
    return {
        family: "has no schema that a model could be shown" if family in CLIENTS_OWN else "would run at Anthropic"
        for family in families
    }


def _choice(asked: MessagesPrompt, tools: Sequence[Tool]) -> ToolChoice:
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


def _thinking(asked: MessagesPrompt) -> ThinkingParams:
    """Return the thinking settings. The token budget is ignored, and thinking is returned even when the client asks to
    omit it: the client sends it back, which keeps the prompt prefix stable."""
    kind = asked.thinking.type if asked.thinking else None
    if kind == "disabled":
        return ThinkingParams(enabled=False)
    effort = asked.output_config.effort if asked.output_config else None
    return ThinkingParams(enabled=True if kind == "enabled" else None, effort=EFFORTS.get(effort or "", effort))
