"""Tools of the Responses API, translated to functions for the model.

Handles free-text ("custom") tools, namespaces and tools that run elsewhere. Independent of the model's call format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvstrata.errors import InvalidRequest
from kvstrata.server.chat.request import Tool, ToolChoice
from kvstrata.server.responses.schema import (
    AllowedTools,
    ChosenTool,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    OtherTool,
    ResponsesRequest,
)

FREE_TEXT = "input"  # the one parameter of a free-text tool
_BEFORE = ("{", f'"{FREE_TEXT}"', ":", '"')
_HIGH = r"[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf"\\u({_HIGH})\\u({_LOW})|\\u([0-9a-fA-F]{{4}})|\\([^u])")
# An incomplete escape at the end of the text: a part of one, or the first of a surrogate pair.
_BEGUN = re.compile(rf"\\(u(?:[0-9a-fA-F]{{0,3}}|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?\Z")
_PLAIN = re.compile(r'[^"\\]+')
_MEANT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True)
class ToolName:
    """The client's name of a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # takes free text instead of JSON


@dataclass(frozen=True)
class ToolNames:
    """The tools of a request. `tools`: functions for the model; `names`: the client's name for each of the model's
    names."""

    tools: tuple[Tool, ...] = ()
    names: dict[str, ToolName] = field(default_factory=dict)

    def shown_name(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a tool, or the client's name if a tool of an earlier turn no longer exists."""
        return self._shown_names.get((name, namespace), name)

    def find_name(self, name: str | None, namespace: str | None) -> str | None:
        """Return the model's name of a tool that the client names, possibly without its namespace, or None."""
        if namespace is None:
            return self._by_name.get(name)
        return self._shown_names.get((name or "", namespace))

    @cached_property
    def _by_name(self) -> dict[str | None, str]:
        """The model's names by the client's names; the first tool with a name wins."""
        return {known.name: shown for shown, known in reversed(self.names.items())}

    @cached_property
    def _shown_names(self) -> dict[tuple[str, str | None], str]:
        return {(known.name, known.namespace): shown for shown, known in self.names.items()}

    def only(self, names: set[str]) -> ToolNames:
        kept = tuple(tool for tool in self.tools if tool["function"]["name"] in names)
        return ToolNames(kept, self.names)


def tool_names(tools: Sequence[Any]) -> ToolNames:
    functions: list[Tool] = []
    names: dict[str, ToolName] = {}
    for where, tool, namespace in _flat(tools):
        if isinstance(tool, OtherTool):
            continue
        known = ToolName(tool.name, namespace, isinstance(tool, CustomTool))
        # Two namespaces may have tools with the same name; the model must be able to distinguish them.
        name = f"{namespace}__{tool.name}" if namespace and tool.name in names else tool.name
        if name in names:
            raise InvalidRequest(f"{where}: another tool has the name '{name[:80]}' too. Rename one.", param=where)
        names[name] = known
        functions.append({"type": "function", "function": _function(tool, name)})
    return ToolNames(tuple(functions), names)


def ignored_tools(tools: Sequence[Any]) -> dict[str, str]:
    """Return the types of tools that have no effect here, each with the reason."""
    return {tool.type: "does not run here" for _, tool, _ in _flat(tools) if isinstance(tool, OtherTool)}


def choose_tools(asked: ResponsesRequest, box: ToolNames) -> tuple[ToolNames, ToolChoice]:
    """Return the tools that may be called, and whether a call is required."""
    parallel = asked.parallel_tool_calls is not False
    choice = asked.tool_choice or "auto"
    if isinstance(choice, ChosenTool):
        return box, ToolChoice("required", _chosen(box, choice), parallel)
    if isinstance(choice, AllowedTools):
        box, mode = box.only(_allowed(box, choice)), choice.mode
    else:
        mode = choice
    if mode == "required" and not box.tools:
        raise InvalidRequest("tool_choice: 'required' needs tools that this server can offer.", param="tool_choice")
    return box, ToolChoice(mode, parallel=parallel)


def _flat(tools: Sequence[Any]) -> Iterator[tuple[str, FunctionTool | CustomTool | OtherTool, str | None]]:
    """Yield each tool with its position and namespace. Tools without a namespace come first and so keep their names."""
    for index, tool in enumerate(tools):
        if not isinstance(tool, NamespaceTool):
            yield f"tools.{index}", tool, None
    for index, space in enumerate(tools):
        if isinstance(space, NamespaceTool):
            for inner, tool in enumerate(space.tools):
                yield f"tools.{index}.tools.{inner}", tool, space.name


def _function(tool: FunctionTool | CustomTool, name: str) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return {"name": name, "description": _description(tool), "parameters": _free_text()}
    function: dict[str, Any] = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return function


def _free_text() -> dict[str, Any]:
    text = {"type": "string", "description": "The whole input, as plain text"}
    return {"type": "object", "properties": {FREE_TEXT: text}, "required": [FREE_TEXT], "additionalProperties": False}


def _description(tool: CustomTool) -> str:
    said, form = tool.description or "", tool.format
    if form is None or not form.definition:
        return said
    grammar = f"The input must follow this {form.syntax or 'lark'} grammar:\n{form.definition}"
    return f"{said}\n\n{grammar}" if said else grammar


def _chosen(box: ToolNames, choice: ChosenTool) -> str:
    if choice.type not in ("function", "custom") or choice.name is None:
        raise InvalidRequest(
            f"tool_choice: tools of type {choice.type[:80]} do not run here. Name a function or a custom tool.",
            param="tool_choice",
        )
    name = box.find_name(choice.name, choice.namespace)
    if name is None:
        raise InvalidRequest(
            f"tool_choice: '{choice.name[:80]}' is not among the tools of this request.", param="tool_choice"
        )
    return name


def _allowed(box: ToolNames, choice: AllowedTools) -> set[str]:
    names = {box.find_name(tool.name, tool.namespace) for tool in choice.tools}
    return {name for name in names if name is not None}


class FreeTextInput:
    """Incremental extraction of a free-text tool's input from the JSON arguments that the model writes.

    Models call such a tool like a function, with {"input": "..."}. Each character is read once. Arguments of another
    form are collected and returned at the end of the call.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._expected = list(_BEFORE)  # tokens before the text
        self._held = ""  # not decoded yet
        self._state = "before"

    def add(self, piece: str) -> str:
        """Return the part of the input that a piece of the arguments adds."""
        if self._state in ("before", "other"):
            self._pieces.append(piece)
        self._held += piece
        if self._state == "before":
            self._skip()
        if self._state == "inside":
            return self._unescape()
        if self._state != "before":
            self._held = ""
        return ""

    def finish(self) -> str:
        """Return the rest of the input at the end of the call."""
        if self._state in ("before", "other"):
            return _input_of("".join(self._pieces))
        held, self._held = self._held, ""
        return held if self._state == "inside" else ""

    def _skip(self) -> None:
        while self._expected:
            rest = self._held.lstrip(" \t\r\n")
            wanted = self._expected[0]
            if rest.startswith(wanted):
                self._held = rest[len(wanted) :]
                self._expected.pop(0)
            else:
                self._held = rest
                if not wanted.startswith(rest):
                    self._state = "other"
                return
        self._state = "inside"
        self._pieces.clear()

    def _unescape(self) -> str:
        out: list[str] = []
        text, at = self._held, 0
        while at < len(text):
            if plain := _PLAIN.match(text, at):
                out.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                self._state, at = "after", len(text)
            elif _BEGUN.match(text, at):
                break
            elif escape := _ESCAPE.match(text, at):
                out.append(_unescaped(escape))
                at = escape.end()
            else:  # invalid JSON: keep it as it was written
                out.append(text[at])
                at += 1
        self._held = text[at:]
        return "".join(out)


def _unescaped(escape: re.Match[str]) -> str:
    high, low, single, letter = escape.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
    if single:
        code = int(single, 16)
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)
    return _MEANT.get(letter, letter)


def _input_of(arguments: str) -> str:
    """Return the input of a call in another form: the text under the right name or of the only member, else all
    arguments."""
    try:
        parsed = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict):
        return arguments
    values = [parsed[FREE_TEXT]] if FREE_TEXT in parsed else list(parsed.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
