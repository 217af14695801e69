"""Schemas of tools have no properties but those that they name."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.grammar.closed import closed

A = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED_A = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (A, CLOSED_A),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "patternProperties": {"^x": {}}}, {**A, "patternProperties": {"^x": {}}}),
        ({"properties": {"in": A}}, {"properties": {"in": CLOSED_A}, "additionalProperties": False}),
        ({"properties": {"properties": A}}, {"properties": {"properties": CLOSED_A}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({**A, "anyOf": [{"properties": {"b": {}}}]}, {**A, "anyOf": [{"properties": {"b": {}}}]}),
        ({"allOf": [A, A]}, {"allOf": [A, A]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"$ref": "#/$defs/a", "$defs": {"a": CLOSED_A}}),
        (True, True),
    ],
)
def test_what_is_closed(schema: Any, wanted: Any) -> None:
    assert closed(schema) == wanted


def test_nothing_of_the_client_changes_and_depth_is_bounded() -> None:
    deep: Any = A
    for _ in range(3000):
        deep = {"type": "array", "items": deep}
    assert closed(deep)["items"]["type"] == "array"
    assert "additionalProperties" not in A
