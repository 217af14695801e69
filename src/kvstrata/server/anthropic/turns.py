"""Translation of Anthropic's messages and blocks to messages for chat templates. Pure.

Decides which block types a role may contain, and reports the position of one that is not allowed. Order is preserved: a
cached prefix is only useful if the start of the prompt is stable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kvstrata.errors import InvalidRequest
from kvstrata.server.anthropic.schema import (
    Block,
    DocumentBlock,
    OtherBlock,
    PromptAsked,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnAsked,
)
from kvstrata.text.messages import Message

PLACES: dict[str, tuple[type, ...]] = {
    "user": (TextBlock, DocumentBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock, ToolChangeBlock),
    "tool_result": (TextBlock, DocumentBlock, ToolReferenceBlock),
}
Placed = tuple[str, Block]  # a block and where it stands: messages.0.content.1


def turns(asked: PromptAsked) -> list[Message]:
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


def _blocks(turn: TurnAsked, place: int) -> list[Placed]:
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
    told = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": told}


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
