"""Constraint on a reply as plain data, and its text for llguidance.

Pure: knows no tokenizer. A constraint that cannot be written for llguidance raises ValueError with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher

Kind = Literal["json_schema", "json_object", "regex", "lark", "choice"]

# Bytes of a constraint. The compiler's stack grows with it: `compiler.STACK_BYTES`.
MAX_BYTES = 256 << 10
# Bytes of a text that the lexer reads as one: a regular expression, a Lark grammar (its terminals join others), a
# literal, all patterns of a schema. A mask takes 2.4 us for each byte, on the engine's thread: 0.6 s with 240 KB.
MAX_REGEX_BYTES = 16 << 10
# Whitespace between two parts of a JSON text. Bounded, because small models repeat blanks without end. Enough for an
# indent of 30 levels.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,128}"
# Optional properties of an object. With more the parser has too many alternatives after the first brace, and compiling
# takes seconds.
MAX_OPTIONAL = 400
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# Whitespace before a JSON text or a call.
PADDING = r"/[\x20\x0A\x0D\x09]{1,8}/"


@dataclass(frozen=True)
class Constraint:
    """Constraint of one of five kinds, made by the class methods."""

    kind: Kind
    text: str = ""  # of the schema, the regex or the Lark grammar
    choices: tuple[str, ...] = ()
    strict: bool = True  # of a schema: what cannot be enforced is refused, not ignored
    padded: bool = False  # of JSON: whitespace may come first, as after thinking
    is_composed: bool = False  # of a Lark grammar: made here, of parts that were each measured

    @classmethod
    def json_schema(
        cls, schema: str | dict[str, Any] | bool, *, strict: bool = True, padded: bool = False
    ) -> Constraint:
        """Return a constraint to a JSON schema, given as its JSON text or as its value."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return cls("json_schema", text, strict=strict, padded=padded)

    @classmethod
    def json_object(cls, *, padded: bool = False) -> Constraint:
        return cls("json_object", padded=padded)

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return a constraint that the whole reply must match."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str, *, is_composed: bool = False) -> Constraint:
        """Return a constraint to a grammar in llguidance's dialect of Lark."""
        return cls("lark", grammar, is_composed=is_composed)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Constraint:
        return cls("choice", choices=tuple(choices))


def grammar_source(constraint: Constraint) -> str:
    """Return the grammar that llguidance compiles."""
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


def lark_rule(constraint: Constraint) -> str:
    """Return the right side of a rule in a larger Lark grammar."""
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
    """Return a pattern as llguidance writes it in Lark, slashes and line breaks escaped."""
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return grammar["lark_grammar"].removeprefix("start: ")


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def json_rule(schema: Any, *, strict: bool) -> str:
    """Return the right side of a Lark rule: a JSON text that the schema allows."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("the schema must be a JSON object")
    _require_limits(schema)
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, dict) else {}), "lenient": not strict}
    return "%json " + _dumped({**schema, "x-guidance": options})


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _require_limits(schema: dict[str, Any]) -> None:
    patterns: set[str] = set()
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            _require_few_optional(part)
            patterns |= _patterns(part)
            left += _subschemas(part)
    num_bytes = sum(map(_num_bytes, patterns))
    if num_bytes > MAX_REGEX_BYTES:
        raise ValueError(f"its patterns have {num_bytes:,} bytes together; at most {MAX_REGEX_BYTES:,} are taken")


def _require_few_optional(part: dict[str, Any]) -> None:
    if not isinstance(properties := part.get("properties"), dict):
        return
    required = part.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    num_optional = len(properties.keys() - names)
    if num_optional > MAX_OPTIONAL:
        raise ValueError(f"an object has {num_optional} optional properties; at most {MAX_OPTIONAL} are taken")


def _patterns(part: dict[str, Any]) -> set[str]:
    """Return the regular expressions of one schema, without those of schemas inside it."""
    own, named = part.get("pattern"), part.get("patternProperties")
    options = part.get("x-guidance")
    texts = [own, *(named if isinstance(named, dict) else ()), *(options.values() if isinstance(options, dict) else ())]
    return {text for text in texts if isinstance(text, str)}


def _subschemas(part: dict[str, Any]) -> list[Any]:
    """Return the parts of a schema that have limits of their own. Checks the length of constants and enum values."""
    found: list[Any] = []
    for key, value in part.items():
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            for name in value:
                _require_short(name)
            found += value.values()
        elif key == "const":
            _require_short(value)
        elif key == "enum" and isinstance(value, list):
            for each in value:
                _require_short(each)
        else:
            found.append(value)
    return found


def _require_short(value: Any) -> None:
    num_bytes = _num_bytes(value if isinstance(value, str) else _dumped(value))
    if num_bytes > MAX_REGEX_BYTES:
        raise ValueError(f"it has a text of {num_bytes:,} bytes; at most {MAX_REGEX_BYTES:,} are taken")


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def literal(text: str) -> str:
    """Return a Lark literal for a text, escaped because Lark's lexer accepts no control characters."""
    _require_short(text)
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
    is_one_text = constraint.kind == "regex" or (constraint.kind == "lark" and not constraint.is_composed)
    max_bytes = MAX_REGEX_BYTES if is_one_text else MAX_BYTES
    if num_bytes > max_bytes:
        raise ValueError(f"it has {num_bytes:,} bytes; at most {max_bytes:,} are taken")
