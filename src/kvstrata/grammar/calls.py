"""A grammar for tool calls: the texts that a model's template writes around them, and the schemas of their arguments.

Pure. Knows neither tools nor templates, only texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.errors import InvalidRequest
from kvstrata.grammar.closed import closed
from kvstrata.grammar.constraint import Constraint
from kvstrata.grammar.source import PADDING, json_rule, literal, rule_of

CallForm = tuple[str, dict[str, Any], str]  # text before the arguments, their schema, text after them
Encode = Callable[[str], Sequence[str | int]]  # plain text and ids of added tokens: Grammars.pieces


def calls_grammar(
    tools: Sequence[CallForm],
    encode: Encode,
    *,
    several: bool,
    or_text: bool = False,
    otherwise: Constraint | None = None,
) -> Constraint:
    """A call to one of `tools`. `several`: or more of them, with whitespace between. `or_text`: or a free text that
    does not begin as a call does. Calls that begin with an added token may follow such a text. `otherwise`: or a reply
    that keeps to this.

    Schemas are closed, and not strict: what llguidance cannot enforce is left to whoever runs the tool. One that cannot
    be written at all raises InvalidRequest.
    """
    if not tools:
        raise ValueError("there are no tools to call")
    calls = [_Call.made(f"call{number}", tool, encode) for number, tool in enumerate(tools)]
    start = f"PADDING? {_run(calls, several=several)}"
    rules = [f"{call.name}: {call.rule}" for call in calls] + [f"PADDING: {PADDING}"]
    if or_text:
        marked = [call for call in calls if call.mark]
        start += f" | TEXT ({_run(marked, several=several)})?" if marked else " | TEXT"
        rules.append(f"TEXT: {_free_text(calls)}")
    if otherwise is not None:
        start += " | otherwise"
        rules.append(f"otherwise: {rule_of(otherwise)}")
    return Constraint.lark("\n".join([f"start: {start}", *rules]), is_composed=True)


@dataclass(frozen=True)
class _Call:
    name: str  # of its rule
    rule: str
    mark: str  # the text of the added token that it begins with; empty: it begins with plain text
    first: str  # the first character otherwise

    @staticmethod
    def made(name: str, tool: CallForm, encode: Encode) -> _Call:
        before, schema, after = tool
        head = encode(before)
        symbols = [*map(_symbol, head), _arguments(schema, before), *map(_symbol, encode(after))]
        is_marked = bool(head) and isinstance(head[0], int)
        mark = _first_token(before, encode) if is_marked else ""
        # Arguments that nothing comes before begin with a brace.
        return _Call(name, " ".join(symbols), mark, "" if is_marked else (before or "{")[0])


def _arguments(schema: dict[str, Any], before: str) -> str:
    try:
        return json_rule(closed(schema), strict=False)
    except ValueError as error:
        message = f"The parameters of a tool cannot be used: {error}. Its calls begin with {before[:100]!r}"
        raise InvalidRequest(message, param="tools") from error


def _first_token(text: str, encode: Encode) -> str:
    """The text of the added token that `text` begins with."""
    (token, *_) = encode(text)
    return next(text[:end] for end in range(1, len(text) + 1) if list(encode(text[:end])) == [token])


def _symbol(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else literal(piece)


def _run(calls: Sequence[_Call], *, several: bool) -> str:
    one = f"({' | '.join(call.name for call in calls)})"
    return f"{one} (PADDING? {one})* PADDING?" if several else one


def _free_text(calls: Sequence[_Call]) -> str:
    """At least a character. It begins with that of no call, and does not spell the added token of one."""
    firsts = "".join(sorted({_escaped(call.first) for call in calls if call.first}))
    text = f"/(?s:[^{firsts}].*)/" if firsts else "/(?s:.+)/"
    return " & ".join([text, *(f"~/{_escaped(mark)}(?s:.*)/" for mark in sorted({call.mark for call in calls} - {""}))])


def _escaped(text: str) -> str:
    """In a regex, or in one of its classes."""
    return re.sub(r"[^0-9A-Za-z]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)
