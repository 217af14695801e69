"""A hundred JSON schemas, by name. Bounded, so that a random model comes to an end with each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "maxLength": 6}
SMALL: Schema = {"type": "integer", "minimum": -20, "maximum": 300}
FLAG: Schema = {"type": "boolean"}
PART: Schema = {"type": "number", "minimum": 0, "maximum": 1}


def closed(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object with these properties and no others."""
    needed = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
        **more,
    }


def listed(items: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def schemas() -> dict[str, Schema]:
    made = dict([*_values(), *_numbers(), *_texts(), *_objects(), *_nested(), *_unions(), *_references(), *_unicode()])
    assert len(made) == 100, len(made)
    return made


def _values() -> Iterator[tuple[str, Schema]]:
    for number, value in enumerate([None, True, 7, -1.5, "text", "", [1, "a"], {"a": {"b": []}}]):
        yield f"const {number}", {"const": value}
    yield "enum of texts", {"enum": ["red", "green", "blue", "re"]}
    yield "enum of all kinds", {"enum": [None, False, 3, 2.5, "x", [1], {"k": "v"}]}
    yield "boolean", FLAG
    yield "null", {"type": "null"}
    yield "two types", {"type": ["boolean", "null"]}
    yield "text or number", {"type": ["string", "integer"], "maxLength": 5, "minimum": 0, "maximum": 99}


def _numbers() -> Iterator[tuple[str, Schema]]:
    bounds = [(0, 9), (-5, 5), (10, 99), (100, 101), (-1000, -990), (0, 123456), (7, 7)]
    for low, high in bounds:
        yield f"integer {low} to {high}", {"type": "integer", "minimum": low, "maximum": high}
    for low, high in [(0, 1), (-2.5, 2.5), (3.25, 3.5)]:
        yield f"number {low} to {high}", {"type": "number", "minimum": low, "maximum": high}
    yield "exclusive", {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9}
    yield "exclusive number", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    for step in (2, 7, 25):
        yield f"multiple of {step}", {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 1000}


def _texts() -> Iterator[tuple[str, Schema]]:
    patterns = [
        "^[a-z]{2,5}$",
        "^(foo|bar)+x?$",
        "^[0-9]{3}-[0-9]{4}$",
        "^#[0-9a-f]{6}$",
        "^[A-Z][a-z]*( [A-Z])?$",
        "^$",
    ]
    for pattern in patterns:
        yield f"pattern {pattern}", {"type": "string", "pattern": pattern, "maxLength": 24}
    for least, most in [(0, 0), (1, 1), (3, 6), (10, 20)]:
        yield f"length {least} to {most}", {"type": "string", "minLength": least, "maxLength": most}
    for form in ("date", "time", "uuid", "ipv4", "email", "date-time"):
        yield f"format {form}", {"type": "string", "format": form}


def _objects() -> Iterator[tuple[str, Schema]]:
    yield "empty object", closed({})
    yield "one property", closed({"name": WORD})
    yield "all kinds", closed({"s": WORD, "i": SMALL, "n": PART, "b": FLAG, "z": {"type": "null"}})
    yield "optional", closed({"a": SMALL, "b": FLAG, "c": WORD}, ["b"])
    yield "all optional", closed({"a": SMALL, "b": FLAG, "c": WORD}, [])
    yield "names that need quotes", closed({"a b": SMALL, 'q"u': FLAG, "back\\slash": FLAG, "": SMALL})
    yield "map", {"type": "object", "additionalProperties": FLAG, "maxProperties": 3}
    yield "map with a least", {"type": "object", "additionalProperties": SMALL, "minProperties": 1, "maxProperties": 2}
    yield "known and more", {**closed({"id": SMALL}), "additionalProperties": FLAG, "maxProperties": 3}
    yield (
        "by pattern",
        {
            "type": "object",
            "patternProperties": {"^x[0-9]$": SMALL},
            "additionalProperties": False,
            "maxProperties": 3,
        },
    )
    yield "choices inside", closed({"color": {"enum": ["red", "blue"]}, "sizes": listed({"enum": [1, 2, 3]}, 1, 3)})
    yield "order of another kind", closed({"z": SMALL, "a": SMALL, "m": FLAG}, ["m", "z"])
    for count in (2, 5, 12, 30):
        yield f"{count} properties", closed({f"key_{i}": FLAG if i % 2 else SMALL for i in range(count)})


def _nested() -> Iterator[tuple[str, Schema]]:
    for least, most in [(0, 0), (0, 3), (2, 2), (3, 5)]:
        yield f"array {least} to {most}", listed(SMALL, least, most)
    yield "array of arrays", listed(listed(listed(FLAG, 1, 2), 1, 2), 1, 2)
    yield "tuple", {"type": "array", "prefixItems": [SMALL, WORD, FLAG], "items": False, "minItems": 3}
    yield "tuple and more", {"type": "array", "prefixItems": [WORD], "items": FLAG, "minItems": 1, "maxItems": 4}
    for depth in (2, 4, 8, 16):
        schema = SMALL
        for level in range(depth):
            schema = closed({f"level_{level}": schema})
        yield f"{depth} levels", schema
    person = closed({"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 130}})
    yield "people", closed({"people": listed(person, 1, 3), "total": SMALL})
    yield "matrix", closed({"rows": listed(listed(PART, 2, 2), 2, 2)})
    call = closed({"name": {"const": "search"}, "arguments": closed({"query": WORD, "limit": SMALL}, ["query"])})
    yield "tool call", call
    yield "tool calls", closed({"calls": listed(call, 1, 2)})


def _unions() -> Iterator[tuple[str, Schema]]:
    yield "any of values", {"anyOf": [SMALL, FLAG, {"type": "null"}]}
    yield (
        "any of objects",
        {"anyOf": [closed({"cat": WORD}), closed({"dog": SMALL}), closed({"cat": WORD, "fish": FLAG})]},
    )
    yield (
        "by kind",
        {
            "anyOf": [
                closed({"kind": {"const": "circle"}, "radius": PART}),
                closed({"kind": {"const": "square"}, "side": PART}),
            ]
        },
    )
    yield "one of kinds", {"oneOf": [{"type": "boolean"}, {"type": "null"}, SMALL]}
    yield "all of", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]}
    yield (
        "all of objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
                {"properties": {"b": FLAG}, "required": ["b"]},
            ],
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
        },
    )
    yield "any of arrays", {"anyOf": [listed(FLAG, 1, 2), listed(SMALL, 1, 2), listed({"type": "null"}, 3, 3)]}
    yield (
        "any of patterns",
        {"anyOf": [{"type": "string", "pattern": "^a{1,3}$"}, {"type": "string", "pattern": "^ab$"}]},
    )
    yield "nullable", closed({"maybe": {"anyOf": [WORD, {"type": "null"}]}, "also": {"type": ["integer", "null"]}})
    yield "array of any", listed({"anyOf": [SMALL, closed({"x": FLAG})]}, 1, 3)


def _references() -> Iterator[tuple[str, Schema]]:
    yield "reference", {"$ref": "#/$defs/item", "$defs": {"item": closed({"id": SMALL})}}
    yield "old definitions", {**closed({"a": {"$ref": "#/definitions/w"}}), "definitions": {"w": WORD}}
    yield "reference to a property", closed({"a": SMALL, "b": {"$ref": "#/properties/a"}})
    chain: Schema = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20)}
    yield "chain", {"$ref": "#/$defs/d0", "$defs": {**chain, "d20": FLAG}}
    point = closed({"x": SMALL, "y": SMALL})
    yield "shared", {**closed({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}}), "$defs": {"p": point}}
    maybe = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    yield "linked list", {"$ref": "#/$defs/node", "$defs": {"node": closed({"v": FLAG, "next": maybe})}}
    tree = closed({"leaf": FLAG, "children": listed({"$ref": "#/$defs/tree"}, 0, 1)})
    yield "tree", {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    yield "itself", {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}]}
    odd = {"anyOf": [{"const": 1}, closed({"even": {"$ref": "#/$defs/even"}})]}
    even = {"anyOf": [{"const": 0}, closed({"odd": {"$ref": "#/$defs/odd"}})]}
    yield "each other", {"$ref": "#/$defs/odd", "$defs": {"odd": odd, "even": even}}


def _unicode() -> Iterator[tuple[str, Schema]]:
    yield "unicode names", closed({"größe": SMALL, "日本": FLAG, "\U0001f600": WORD})
    yield "unicode values", {"enum": ["é", "日本語", "\U0001f680", "\u2028", 'quote "', "tab\t"]}
    yield "unicode pattern", {"type": "string", "pattern": "^[\u0430-\u044f]{2,4}$"}
    yield "unicode const", closed({"greeting": {"const": "Привет, мир"}, "n": SMALL})
    yield "escapes", {"const": 'a"b\\c/d\n\u0001'}
