"""Grammar for tool calls: the texts that a model's template writes around them, and the schemas of their arguments.

Pure. Knows neither tools nor templates, only texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.errors import InvalidRequest
from kvstrata.grammar.constraint import PADDING, Constraint, json_rule, lark_rule, literal

MAX_DEPTH = 64  # schemas below this depth stay open
_SCHEMA_MAPS = ("properties", "$defs", "definitions")
_COMPOSITIONS = frozenset(("allOf", "anyOf", "oneOf", "if", "$ref", "dependentSchemas"))
_OTHER_PROPERTIES = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))

CallForm = tuple[str, dict[str, Any], str]  # text before the arguments, their schema, text after them
Encode = Callable[[str], Sequence[str | int]]  # plain text and ids of added tokens: GrammarCompiler.pieces


def tool_call_grammar(
    tools: Sequence[CallForm],
    encode: Encode,
    *,
    several: bool,
    or_text: bool = False,
    otherwise: Constraint | None = None,
) -> Constraint:
    """Return the grammar of a call to one of `tools`.

    `several`: allows several calls, with whitespace between. `or_text`: allows a free text that does not begin as a
    call does; calls that begin with an added token may follow it. `otherwise`: allows a reply that meets this
    constraint.

    Schemas are closed, and not strict: what llguidance cannot enforce is left to the client that runs the tool. A
    schema that cannot be written for llguidance raises InvalidRequest.
    """
    if not tools:
        raise ValueError("there are no tools to call")
    calls = [_CallRule.made(f"call{number}", tool, encode) for number, tool in enumerate(tools)]
    start = f"PADDING? {_run(calls, several=several)}"
    rules = [f"{call.name}: {call.rule}" for call in calls] + [f"PADDING: {PADDING}"]
    if or_text:
        marked = [call for call in calls if call.mark]
        start += f" | TEXT ({_run(marked, several=several)})?" if marked else " | TEXT"
        rules.append(f"TEXT: {_free_text(calls)}")
    if otherwise is not None:
        start += " | otherwise"
        rules.append(f"otherwise: {lark_rule(otherwise)}")
    return Constraint.lark("\n".join([f"start: {start}", *rules]), is_composed=True)


@dataclass(frozen=True)
class _CallRule:
    name: str  # of its rule
    rule: str
    mark: str  # the text of the added token that it begins with; empty: it begins with plain text
    first: str  # the first character otherwise

    @staticmethod
    def made(name: str, tool: CallForm, encode: Encode) -> _CallRule:
        before, schema, after = tool
        head = encode(before)
        symbols = [*map(_symbol, head), _arguments(schema, before), *map(_symbol, encode(after))]
        is_marked = bool(head) and isinstance(head[0], int)
        mark = _first_token(before, encode) if is_marked else ""
        # Arguments that nothing comes before begin with a brace.
        return _CallRule(name, " ".join(symbols), mark, "" if is_marked else (before or "{")[0])


def _arguments(schema: dict[str, Any], before: str) -> str:
    try:
        return json_rule(close_schema(schema), strict=False)
    except ValueError as error:
        message = f"The parameters of a tool cannot be used: {error}. Its calls begin with {before[:100]!r}"
        raise InvalidRequest(message, param="tools") from error


def _first_token(text: str, encode: Encode) -> str:
    """Return the text of the added token that `text` begins with."""
    (token, *_) = encode(text)
    return next(text[:end] for end in range(1, len(text) + 1) if list(encode(text[:end])) == [token])


def _symbol(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else literal(piece)


def _run(calls: Sequence[_CallRule], *, several: bool) -> str:
    one = f"({' | '.join(call.name for call in calls)})"
    return f"{one} (PADDING? {one})* PADDING?" if several else one


def _free_text(calls: Sequence[_CallRule]) -> str:
    """Return a terminal for free text: not empty, without a call's first character or added token at its start."""
    firsts = "".join(sorted({_escaped(call.first) for call in calls if call.first}))
    text = f"/(?s:[^{firsts}].*)/" if firsts else "/(?s:.+)/"
    return " & ".join([text, *(f"~/{_escaped(mark)}(?s:.*)/" for mark in sorted({call.mark for call in calls} - {""}))])


def _escaped(text: str) -> str:
    """Escape a text for a regex or a character class."""
    return re.sub(r"[^0-9A-Za-z]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def close_schema(schema: Any, depth: int = 0) -> Any:
    """Return a schema whose objects have the properties that it names and no others.

    A JSON schema without `additionalProperties` allows them all. Tools mean otherwise, and a small model that may add
    properties does.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    out = dict(schema)
    for name in _SCHEMA_MAPS:
        if isinstance(schemas := schema.get(name), dict):
            out[name] = {key: close_schema(each, depth + 1) for key, each in schemas.items()}
    if "items" in schema:
        out["items"] = close_schema(schema["items"], depth + 1)
    if "properties" not in schema:
        # Alternatives that are whole by themselves. Beside properties they are only parts of an object.
        for name in ("anyOf", "oneOf"):
            if isinstance(schemas := schema.get(name), list):
                out[name] = [close_schema(each, depth + 1) for each in schemas]
    elif not schema.keys() & (_OTHER_PROPERTIES | _COMPOSITIONS):
        out["additionalProperties"] = False
    return out
