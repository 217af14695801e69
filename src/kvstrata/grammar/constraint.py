"""What a reply is held to, as plain data. Knows neither a tokenizer nor whether it can be compiled."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["json_schema", "json_object", "regex", "lark", "choice"]


@dataclass(frozen=True)
class Constraint:
    """One of five kinds; the class methods make them."""

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
        """`schema`: its JSON text, or what that says."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return cls("json_schema", text, strict=strict, padded=padded)

    @classmethod
    def json_object(cls, *, padded: bool = False) -> Constraint:
        return cls("json_object", padded=padded)

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """The whole reply matches it."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str, *, is_composed: bool = False) -> Constraint:
        """In llguidance's dialect."""
        return cls("lark", grammar, is_composed=is_composed)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Constraint:
        return cls("choice", choices=tuple(choices))
