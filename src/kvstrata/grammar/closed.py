"""Schemas of tools, closed: an object has the properties that its schema names, and no others.

By its own rules a JSON schema that says nothing of others allows them all. Tools mean otherwise, and a small model that
may go on adding properties does.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64  # deeper ones stay as they are
_MAPS = ("properties", "$defs", "definitions")
_ELSEWHERE = frozenset(("allOf", "anyOf", "oneOf", "if", "$ref", "dependentSchemas"))
_SAID = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))


def closed(schema: Any, depth: int = 0) -> Any:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    out = dict(schema)
    for name in _MAPS:
        if isinstance(schemas := schema.get(name), dict):
            out[name] = {key: closed(each, depth + 1) for key, each in schemas.items()}
    if "items" in schema:
        out["items"] = closed(schema["items"], depth + 1)
    if "properties" not in schema:
        # Alternatives that are whole by themselves. Beside properties they are only parts of an object.
        for name in ("anyOf", "oneOf"):
            if isinstance(schemas := schema.get(name), list):
                out[name] = [closed(each, depth + 1) for each in schemas]
    elif not schema.keys() & (_SAID | _ELSEWHERE):
        out["additionalProperties"] = False
    return out
