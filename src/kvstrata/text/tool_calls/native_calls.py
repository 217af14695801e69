"""Calls that only mlx-lm's parsers read, which arrive complete, and the call format that a model's tokenizer names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvstrata.text.template_probe import CallText
from kvstrata.text.tool_calls.answer_text import AnswerText, NoCall, OfferedTools, Steps, until
from kvstrata.text.tool_calls.tagged_calls import TagFormat, dump_json, glm_tags

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


Parse = Callable[..., Any]


@dataclass(frozen=True)
class _NativeCall:
    name: str
    arguments: str
    id: str


def scan_native_calls(reading: AnswerText, start: str, end: str, parse: Parse) -> Steps[None]:
    """Scan calls from the start mark on; text that was read behind the mark is held."""
    before, start, read = reading.drop().partition(start)
    body = [read]
    reading.hold()
    found = yield from until(reading, (end,) if end else (), body.append)
    text = "".join(body)
    calls = [] if not found and end and reading.cut_off else _parsed(parse, text, reading.offered)
    if not calls:
        reading.drop()
        reading.say(before + start + text + found)
        raise NoCall
    for call in calls:
        reading.whole_call(call.name, call.arguments, call.id)


def _parsed(parse: Parse, body: str, offered: OfferedTools) -> list[_NativeCall]:
    """Return the calls; none, if one of them is malformed or calls a tool that was not offered."""
    try:
        parsed = parse(body, offered.tools)
        calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
    except Exception:  # noqa: BLE001 mlx-lm's parsers raise anything on malformed calls
        return []
    return calls if all(call.name in offered.names for call in calls) else []


def _call(parsed: dict[str, Any]) -> _NativeCall:
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("a call needs an object of arguments")
    if not isinstance(parsed["name"], str):
        raise TypeError("a call needs a name")
    id = parsed.get("id")
    return _NativeCall(parsed["name"], dump_json(arguments), id if isinstance(id, str) and id.isascii() else "")


@dataclass(frozen=True)
class NativeCallFormat:
    """Format in which the model's template writes calls. `start` empty: without marks."""

    start: str = ""
    end: str = ""
    kind: Literal["json", "headers", "tagged", "whole"] = "json"
    dialect: TagFormat | None = None
    parse: Parse | None = field(default=None, compare=False)


def native_call_format(tokenizer: TokenizerWrapper, written: CallText | None = None) -> NativeCallFormat:
    """Return the format of mlx-lm's parser for the model, or of the marks that the template writes around JSON."""
    start, end, parse = tokenizer.tool_call_start or "", tokenizer.tool_call_end or "", tokenizer.tool_parser
    if not start or parse is None:
        return NativeCallFormat(written.start, written.end) if written else NativeCallFormat()
    match _parser_name(tokenizer):
        case "json_tools" | "qwen3_coder":
            return NativeCallFormat(start, end)
        case "mistral":
            return NativeCallFormat(start, end, "headers")
        case "glm47" | "laguna":
            return NativeCallFormat(start, end, "tagged", glm_tags("", end), parse)
        case "longcat":
            return NativeCallFormat(start, end, "tagged", glm_tags("longcat_", end), parse)
    return NativeCallFormat(start, end, "whole", parse=parse)


def _parser_name(tokenizer: TokenizerWrapper) -> str:
    return str(getattr(tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]
