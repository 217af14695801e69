"""A constraint as text that llguidance compiles. Pure; what cannot be written raises ValueError with the reason."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from kvstrata.grammar.constraint import Constraint

# Bytes of a constraint. A compiler's stack grows with it: see apart.py.
MAX_BYTES = 256 << 10
# Of a regular expression: with 250 KB each mask took up to a second, on the engine's thread.
MAX_REGEX_BYTES = 16 << 10
# Between two parts of a JSON text. Bounded: small models go on with blanks for ever. Enough for an indent of 30 levels.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,128}"
# Of one object. With more the parser has too much to choose from after the first brace, and compiling takes seconds.
MAX_OPTIONAL = 400
# Before a JSON text or a call.
PADDING = r"/[\x20\x0A\x0D\x09]{1,8}/"


def source_of(constraint: Constraint) -> str:
    _require_size(constraint)
    match constraint.kind:
        case "json_schema":
            return _json(json_rule(parse_json(constraint.text), strict=constraint.strict), padded=constraint.padded)
        case "json_object":
            return _json(json_rule({"type": "object"}, strict=True), padded=constraint.padded)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.text)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(constraint.choices))


def rule_of(constraint: Constraint) -> str:
    """The right side of a rule in a larger Lark grammar."""
    _require_size(constraint)
    match constraint.kind:
        case "json_schema":
            return f"PADDING? {json_rule(parse_json(constraint.text), strict=constraint.strict)}"
        case "json_object":
            return f"PADDING? {json_rule({'type': 'object'}, strict=True)}"
        case "regex":
            return _regex_rule(constraint.text)
        case "choice":
            return " | ".join(map(literal, constraint.choices))
        case "lark":
            raise ValueError(
                "a grammar cannot be joined with tool calls: send it without tools, or with tool_choice none"
            )


def _regex_rule(pattern: str) -> str:
    """llguidance knows how a pattern is written in Lark, slashes and line breaks included."""
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return grammar["lark_grammar"].removeprefix("start: ")


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def json_rule(schema: Any, *, strict: bool) -> str:
    """The right side of a Lark rule: a JSON text that the schema allows."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("the schema must be a JSON object")
    _require_few_optional(schema)
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, dict) else {}), "lenient": not strict}
    try:
        return "%json " + json.dumps({**schema, "x-guidance": options})
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _require_few_optional(schema: dict[str, Any]) -> None:
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if not isinstance(part, dict) or not isinstance(properties := part.get("properties"), dict):
            continue
        required = part.get("required")
        num_optional = len(properties) - (len(required) if isinstance(required, list) else 0)
        if num_optional > MAX_OPTIONAL:
            raise ValueError(f"an object has {num_optional} optional properties; at most {MAX_OPTIONAL} are taken")


def literal(text: str) -> str:
    """In Lark: this text and no other. Escaped throughout, since its lexer takes no control characters."""
    return json.dumps(text)


def _json(rule: str, *, padded: bool) -> str:
    lark = f"start: PADDING? {rule}\nPADDING: {PADDING}" if padded else f"start: {rule}"
    return LLMatcher.grammar_from_lark(lark)


def _choice(choices: tuple[str, ...]) -> str:
    if not choices:
        raise ValueError("there is no choice in the list")
    # One terminal: as rules of their own, 2,000 of them would be more than the parser takes.
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, choices))


def _require_size(constraint: Constraint) -> None:
    try:
        num_bytes = len(constraint.text.encode()) + sum(len(choice.encode()) for choice in constraint.choices)
    except UnicodeEncodeError:
        raise ValueError("it is not valid Unicode: it has an unpaired surrogate") from None
    max_bytes = MAX_REGEX_BYTES if constraint.kind == "regex" else MAX_BYTES
    if num_bytes > max_bytes:
        raise ValueError(f"it has {num_bytes:,} bytes; at most {max_bytes:,} are taken")
