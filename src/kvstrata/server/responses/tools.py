"""Tools of the Responses API, translated to functions for the model.

Handles free-text ("custom") tools, namespaces and tools that run elsewhere. Independent of the model's call format.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvstrata.errors import InvalidRequest
from kvstrata.server.conversation.chat import Tool, ToolChoice
from kvstrata.server.responses.schema import (
    AllowedTools,
    ChosenTool,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    OtherTool,
    ResponseAsked,
)

logger = logging.getLogger("kvstrata.server")

FREE_TEXT = "input"  # the one parameter of a free-text tool


@dataclass(frozen=True)
class ToolName:
    """The client's name of a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # takes free text instead of JSON


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request. `tools`: functions for the model; `names`: the client's name for each of the model's
    names."""

    tools: tuple[Tool, ...] = ()
    names: dict[str, ToolName] = field(default_factory=dict)

    def told_as(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a tool, or the client's name if a tool of an earlier turn no longer exists."""
        return self._told.get((name, namespace), name)

    def told_of(self, name: str | None, namespace: str | None) -> str | None:
        """Return the model's name of a tool that the client names, possibly without its namespace, or None."""
        if namespace is None:
            return self._by_name.get(name)
        return self._told.get((name or "", namespace))

    @cached_property
    def _by_name(self) -> dict[str | None, str]:
        """The model's names by the client's names; the first tool with a name wins."""
        return {known.name: told for told, known in reversed(self.names.items())}

    @cached_property
    def _told(self) -> dict[tuple[str, str | None], str]:
        return {(known.name, known.namespace): told for told, known in self.names.items()}

    def only(self, names: set[str]) -> Toolbox:
        kept = tuple(tool for tool in self.tools if tool["function"]["name"] in names)
        return Toolbox(kept, self.names)


class IgnoredTools:
    """Logs, once for each type, that tools of the type do not run here."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, types: Iterable[str]) -> None:
        for kind in types:
            if kind not in self._said and len(self._said) < 100:
                self._said.add(kind)
                logger.info("Tools of type %.80s do not run here: left out of what the model is told.", kind)


def toolbox(tools: Sequence[Any]) -> Toolbox:
    told: list[Tool] = []
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
        told.append({"type": "function", "function": _function(tool, name)})
    return Toolbox(tuple(told), names)


def ignored_types(tools: Sequence[Any]) -> list[str]:
    return [tool.type for _, tool, _ in _flat(tools) if isinstance(tool, OtherTool)]


def choice_of(asked: ResponseAsked, box: Toolbox) -> tuple[Toolbox, ToolChoice]:
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


def _chosen(box: Toolbox, choice: ChosenTool) -> str:
    if choice.type not in ("function", "custom") or choice.name is None:
        raise InvalidRequest(
            f"tool_choice: tools of type {choice.type[:80]} do not run here. Name a function or a custom tool.",
            param="tool_choice",
        )
    name = box.told_of(choice.name, choice.namespace)
    if name is None:
        raise InvalidRequest(
            f"tool_choice: '{choice.name[:80]}' is not among the tools of this request.", param="tool_choice"
        )
    return name


def _allowed(box: Toolbox, choice: AllowedTools) -> set[str]:
    names = {box.told_of(tool.name, tool.namespace) for tool in choice.tools}
    return {name for name in names if name is not None}
