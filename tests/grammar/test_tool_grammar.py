"""Grammars of tool calls, and schemas that allow no further properties."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from kvstrata.errors import InvalidRequest
from kvstrata.grammar.constraint import Constraint
from kvstrata.grammar.tool_grammar import CallForm, close_schema, tool_call_grammar
from tests.grammar.follow import takes, takes_ids
from tests.support.models import byte_grammars, id_of, ids_of

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}

NONE = {"type": "object", "properties": {}, "additionalProperties": False}


def tagged(name: str, schema: dict[str, object]) -> CallForm:
    return f'<tool_call>\n{{"name": "{name}", "arguments": ', schema, "}\n</tool_call>"


def bare(name: str, schema: dict[str, object]) -> CallForm:
    return f'{{"name": "{name}", "parameters": ', schema, "}"


def mistral(name: str, schema: dict[str, object]) -> CallForm:
    return f"[TOOL_CALLS]{name}[ARGS]", schema, ""


FORMS = {"tagged": tagged, "bare": bare, "mistral": mistral}


def written(form: CallForm, arguments: object) -> str:
    return form[0] + json.dumps(arguments) + form[2]


def grammar(tools: list[CallForm], *, several: bool = False, or_text: bool = False) -> Constraint:
    return tool_call_grammar(tools, byte_grammars().pieces, several=several, or_text=or_text)


@pytest.mark.parametrize(("form", "several", "or_text"), list(itertools.product(FORMS, [False, True], [False, True])))
def test_calls_to_each_tool_and_to_no_other(form: str, several: bool, or_text: bool) -> None:
    weather, now = (FORMS[form](*tool) for tool in (("weather", CITY), ("now", NONE)))
    constraint = grammar([weather, now], several=several, or_text=or_text)
    one, two = written(weather, {"city": "Ulm"}), written(now, {})
    assert takes(constraint, one)
    assert takes(constraint, "\n\n" + two) or (or_text and form == "bare")
    assert not takes(constraint, written(weather, {}))
    assert not takes(constraint, written(now, {"city": "Ulm"}))
    assert not takes(constraint, written(FORMS[form]("other", CITY), {"city": "Ulm"}))
    assert takes(constraint, one + "\n" + two) == several
    assert takes(constraint, one + two + one) == several
    assert not takes(constraint, "")


@pytest.mark.parametrize("form", FORMS)
def test_text_instead_of_calls_only_where_it_may_be(form: str) -> None:
    tool = FORMS[form]("weather", CITY)
    for text in ("It is warm.", "é", "Use {braces} and <tags>, [too]."):
        assert takes(grammar([tool], or_text=True), text)
        assert not takes(grammar([tool]), text)


def test_text_does_not_begin_as_a_call_of_plain_text_does() -> None:
    constraint = grammar([bare("weather", CITY), ("call weather ", CITY, "")], or_text=True)
    assert not takes(constraint, "{no call}")
    assert not takes(constraint, "certainly")
    assert takes(constraint, "Certainly")
    assert takes(constraint, 'call weather {"city": "Ulm"}')


def test_text_does_not_spell_the_token_that_calls_begin_with() -> None:
    constraint = grammar([tagged("weather", CITY)], or_text=True)
    spelled = [id_ for char in "<tool_call>" for id_ in ids_of(char)]
    assert not takes_ids(constraint, spelled)
    assert takes_ids(constraint, spelled[:-1])
    assert takes(constraint, "<b>")


@pytest.mark.parametrize("form", ["tagged", "mistral"])
def test_calls_that_begin_with_a_token_may_follow_a_text(form: str) -> None:
    tool = FORMS[form]("weather", CITY)
    call = written(tool, {"city": "Ulm"})
    assert takes(grammar([tool], or_text=True), "I will look.\n" + call)
    assert not takes(grammar([tool], or_text=True), "I will look.\n" + written(tool, {}))
    assert takes(grammar([tool], several=True, or_text=True), "I will look.\n" + call + "\n" + call)
    assert not takes(grammar([tool], several=True), "I will look.\n" + call)


def test_arguments_that_nothing_comes_before() -> None:
    constraint = grammar([("", CITY, "")], or_text=True)
    assert takes(constraint, '{"city": "Ulm"}')
    assert not takes(constraint, "{x")
    assert takes(constraint, "x")


def test_added_tokens_in_texts_are_ids_and_blanks_are_not() -> None:
    pieces = byte_grammars().pieces
    tool, args = id_of("<tool_call>"), id_of("[ARGS]")
    assert pieces("<tool_call>  x[ARGS][ARGS]") == [tool, "  x", args, args]
    assert pieces("a<tool_call") == ["a<tool_call"]
    assert pieces("") == []


def test_what_llguidance_cannot_enforce_is_left_out() -> None:
    odd = {**CITY, "not": {"required": ["town"]}}
    constraint = grammar([tagged("weather", odd)])
    assert takes(constraint, written(tagged("weather", odd), {"city": "Ulm"}))
    assert byte_grammars().compile(constraint).ignored


def test_no_tools_make_no_grammar() -> None:
    with pytest.raises(ValueError, match="no tools"):
        grammar([])


def test_names_and_texts_need_no_escaping_by_the_caller() -> None:
    tool = ('"quoted"\n\\back/ %json {} <x> ', NONE, ' // # end "')
    assert takes(grammar([tool], or_text=True), written(tool, {}))
    assert not takes(grammar([tool], or_text=True), written(tool, {})[:-1])


def test_a_schema_that_cannot_be_written_is_the_clients_error() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}
    for schema in (wide, ["no object"]):
        with pytest.raises(InvalidRequest, match="parameters of a tool") as refused:
            grammar([tagged("weather", schema)])  # pyright: ignore[reportArgumentType]
        assert refused.value.param == "tools"


def test_many_tools_compile_and_too_many_are_refused() -> None:
    assert takes(
        grammar([tagged(f"tool_{i}", CITY) for i in range(300)]), written(tagged("tool_299", CITY), {"city": ""})
    )
    with pytest.raises(InvalidRequest, match="bytes"):
        byte_grammars().compile(grammar([tagged(f"tool_{i}", CITY) for i in range(10_000)]))


@pytest.mark.parametrize("form", FORMS)
def test_a_call_or_a_text_that_matches_a_pattern(form: str) -> None:
    tool = FORMS[form]("now", NONE)
    pattern = Constraint.regex('[ab]{3}/"\n\\d')
    constraint = tool_call_grammar([tool], byte_grammars().pieces, several=False, otherwise=pattern)
    assert takes(constraint, written(tool, {}))
    assert takes(constraint, 'aba/"\n7')
    assert not takes(constraint, 'abc/"\n7')
    assert not takes(constraint, "aba")


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
    assert close_schema(schema) == wanted


def test_nothing_of_the_client_changes_and_depth_is_bounded() -> None:
    deep: Any = A
    for _ in range(3000):
        deep = {"type": "array", "items": deep}
    assert close_schema(deep)["items"]["type"] == "array"
    assert "additionalProperties" not in A
