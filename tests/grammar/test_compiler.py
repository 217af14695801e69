"""Constraints compiled for a byte-level tokenizer: what they allow, and what is refused with a reason."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PythonBackend

from kvstrata.errors import InvalidRequest, QueueFull
from kvstrata.grammar import compiler as module
from kvstrata.grammar.compiler import CompilePool, CompilersBusy, GrammarCompiler
from kvstrata.grammar.constraint import MAX_REGEX_BYTES, Constraint
from kvstrata.grammar.matcher import MAX_REASON_CHARS, TokenMasks
from tests.grammar.follow import allowed_ids, takes, takes_ids
from tests.support.models import (
    PADDED_LOGITS,
    byte_grammars,
    byte_model,
    byte_tokenizer,
    id_of,
    ids_of,
    new_grammars,
    tiny_tokenizer,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

LONG = "a" * (MAX_REGEX_BYTES + 1)


def chain(num_links: int) -> dict[str, Any]:
    """Each definition is an array of the next."""
    links = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(num_links)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{num_links}": {"type": "null"}}}


def refusal(constraint: Constraint) -> str:
    with pytest.raises(InvalidRequest) as refused:
        byte_grammars().compile(constraint, param="response_format")
    assert refused.value.param == "response_format"
    return refused.value.message


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint.json_schema(PERSON), '{"name": "Ann", "age": 7}', '{"name": "Ann"}'),
        (Constraint.json_schema(json.dumps(PERSON)), '{\n  "name": "é",\n  "age": -7\n}', ' {"name": "", "age": 7}'),
        (Constraint.json_schema(PERSON, padded=True), '\n\n{"name": "é日", "age": 7}', 'So: {"name": "", "age": 7}'),
        (Constraint.json_schema(True), "[1]", "x"),
        (Constraint.json_object(), '{"a": [true, null, 1e3]}', "[1]"),
        (Constraint.json_object(padded=True), "\n{}", "\n[]"),
        (Constraint.regex("[0-9]{3}-x?"), "123-", "12-"),
        (Constraint.lark('start: "a" (" " B)*\nB: /b+/'), "a bb b", "a  b"),
        (Constraint.choice(["yes", 'n"o\n', "no\\/", "日本"]), 'n"o\n', "n"),
        (Constraint.choice(["yes", ""]), "", "ye"),
    ],
)
def test_each_kind_takes_what_it_should(constraint: Constraint, good: str, bad: str) -> None:
    assert takes(constraint, good)
    assert not takes(constraint, bad)


@settings(max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=5, unique=True))
def test_a_choice_is_any_text_and_that_text_alone(choices: list[str]) -> None:
    constraint = Constraint.choice(choices)
    # Bytes, one by one: added tokens are no text.
    for choice in choices:
        ids = [id_ for char in choice for id_ in ids_of(char)]
        matcher = byte_grammars().compile(constraint).matcher()
        assert matcher.native.try_consume_tokens(ids) == len(ids)
        assert matcher.native.is_accepting()


def test_blanks_inside_json_are_bounded() -> None:
    constraint = Constraint.json_object()
    space = id_of(" ")
    matcher = byte_grammars().compile(constraint).matcher()
    matcher.consume(0, id_of("{"))
    count = 0
    while space in allowed_ids(matcher):
        matcher.consume(1 + count, space)
        count += 1
    assert count == 128


def test_every_end_of_sequence_is_allowed_where_the_grammar_may_end_and_nowhere_else() -> None:
    eos_ids = byte_model().eos_ids
    assert len(eos_ids) == 2
    matcher = byte_grammars().compile(Constraint.regex("ab?")).matcher()
    assert not eos_ids & allowed_ids(matcher)
    matcher.consume(0, id_of("a"))
    assert allowed_ids(matcher) == {*eos_ids, id_of("b")}
    matcher.consume(1, id_of("b"))
    assert allowed_ids(matcher) == eos_ids
    # A step that was launched before the end was known.
    matcher.consume(2, min(eos_ids))
    assert allowed_ids(matcher) == eos_ids
    assert not matcher.error


def test_logits_that_stand_for_no_token_are_never_allowed() -> None:
    first_padded = byte_model().vocab_size - PADDED_LOGITS
    assert max(allowed_ids(byte_grammars().compile(Constraint.regex("(?s:.*)")).matcher())) < first_padded


def test_a_tokenizer_may_have_more_tokens_than_the_model_has_logits() -> None:
    few = id_of("{") + 1  # no token past the brace: none for two letters
    grammars = GrammarCompiler(byte_tokenizer(), few, [0])
    matcher = grammars.compile(Constraint.regex("[{]+é")).matcher()
    allowed = TokenMasks().fill([matcher], few)
    assert allowed.tokens is not None
    assert allowed.tokens.shape == (1, few)
    assert allowed.tokens[0, id_of("{")]
    # Then comes what it has no token for.
    only = TokenMasks().fill([grammars.compile(Constraint.regex("é")).matcher()], few)
    assert "no token" in only.failures[0]
    assert only.tokens is not None
    assert only.tokens.all()


def test_a_grammar_begins_after_its_ids_in_a_row() -> None:
    after = (id_of("a"), id_of("a"), id_of("</think>"))
    grammar = byte_grammars().compile(Constraint.regex("[0-9]+"))
    matcher = grammar.matcher(after)
    free = set(range(byte_model().vocab_size))
    thoughts = [id_of("a"), id_of("</think>"), id_of("a"), id_of("a"), id_of("a")]
    for place, id_ in enumerate(thoughts):
        assert allowed_ids(matcher) == free
        matcher.consume(place, id_)
    matcher.consume(len(thoughts), id_of("</think>"))
    assert matcher.has_begun
    assert id_of("7") in allowed_ids(matcher)
    assert id_of("a") not in allowed_ids(matcher)


def test_a_matcher_takes_each_token_once_and_in_order() -> None:
    matcher = byte_grammars().compile(Constraint.regex("[0-9]+")).matcher()
    matcher.consume(0, id_of("7"))
    for place in (0, 2):
        with pytest.raises(RuntimeError, match="taken 1 tokens"):
            matcher.consume(place, id_of("7"))


def test_a_token_that_is_not_allowed_is_an_error_of_that_row_alone() -> None:
    grammar = byte_grammars().compile(Constraint.regex("[0-9]+"))
    bad, good = grammar.matcher(), grammar.matcher()
    bad.consume(0, id_of("x"))
    allowed = TokenMasks().fill([good, None, bad], byte_model().vocab_size)
    assert list(allowed.failures) == [2]
    assert "doesn't satisfy the grammar" in allowed.failures[2]
    assert allowed.tokens is not None
    assert allowed.tokens[1:].all()
    assert not allowed.tokens[0].all()


def test_replies_that_share_a_grammar_do_not_share_where_they_stand() -> None:
    grammar = byte_grammars().compile(Constraint.regex("ab"))
    one, other = grammar.matcher(), grammar.matcher()
    one.consume(0, id_of("a"))
    assert allowed_ids(one) == {id_of("b")}
    # A text that is forced is written as the tokenizer writes it.
    assert allowed_ids(other) == set(ids_of("ab"))


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint.json_schema('{"type": '), "line 1"),
        (Constraint.json_schema("3"), "must be a JSON object"),
        (Constraint.json_schema(False), "must be a JSON object"),
        (Constraint.json_schema({"type": "strin"}), "strin"),
        (Constraint.json_schema({"$ref": "#/nowhere"}), "does not exist"),
        (Constraint.json_schema({"$ref": "https://example.com/schema"}), "example.com"),
        (Constraint.json_schema({"$ref": "#"}), "no text can match"),
        (Constraint.json_schema({"allOf": [{"$ref": "#"}, {"type": "object"}]}), "circular"),
        (Constraint.json_schema({"type": "integer", "minimum": 5, "maximum": 2}), "greater than maximum"),
        (Constraint.json_schema({"type": "string", "pattern": "(a"}), "unclosed group"),
        (Constraint.json_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (Constraint.json_schema({"not": {"type": "string"}}, padded=True), 'Unimplemented keys: ["not"]'),
        (Constraint.json_schema({"type": "string", "format": "iban"}), "Unknown format"),
        (Constraint.json_schema('{"items":' * 90_000), "bytes"),
        (Constraint.json_schema('{"items":' * 20_000 + "1" + "}" * 20_000), "nested too deeply"),
        (Constraint.json_schema('{"items":' * 400 + "{}" + "}" * 400), "recursion limit"),
        (Constraint.json_schema({"properties": {f"p{i}": {} for i in range(500)}}), "500 optional properties"),
        (Constraint.json_schema('{"pattern": "\\ud800"}'), "hex escape"),
        (Constraint.regex("(a"), "unclosed group"),
        (Constraint.regex("a(?=b)"), "look-around"),
        (Constraint.regex(LONG), "bytes"),
        # Wherever a text stands that the lexer reads as one.
        (Constraint.lark(f"start: A\nA: /{LONG}/"), "bytes"),
        (Constraint.lark(f'start: "{LONG}"'), "bytes"),
        (Constraint.lark("start: A\nA: " + " ".join(f"/{'a' * 99}/" for _ in range(200))), "bytes"),
        (Constraint.choice([LONG, "a"]), "bytes"),
        (Constraint.json_schema({"type": "string", "pattern": LONG}), "patterns have"),
        (Constraint.json_schema({"allOf": [{"pattern": f"{i}{'a' * 5000}"} for i in range(4)]}), "patterns have"),
        (Constraint.json_schema({"items": {"patternProperties": {LONG: {}}}}), "bytes"),
        (Constraint.json_schema({"x-guidance": {"whitespace_pattern": LONG}}), "patterns have"),
        (Constraint.json_schema({"properties": {"a": {"const": LONG}}}), "a text of"),
        (Constraint.json_schema({"anyOf": [{"enum": ["a", LONG]}]}), "a text of"),
        (Constraint.json_schema({"const": {"description": LONG}}), "a text of"),
        (Constraint.json_schema({"properties": {LONG: {}}}), "a text of"),
        (
            Constraint.json_schema({"properties": {f"p{i}": {} for i in range(500)}, "required": ["p0"] * 200}),
            "499 optional properties",
        ),
        (Constraint.regex("\ud800"), "surrogate"),
        (Constraint.regex("(" * 8_000 + ")" * 8_000), "nest"),
        (Constraint.lark("begin: /a/"), "no start rule"),
        (Constraint.lark("start: a"), "unknown name"),
        (Constraint.lark("start: <[99999]>"), "too large"),
        (Constraint.lark("start: " + "(" * 9000 + '"a"' + ")" * 9000, is_composed=True), "nested"),
        (Constraint.lark("start: a\na: a"), "no text can match"),
        (Constraint.choice([]), "no choice"),
        (Constraint.choice(["a" * 1000] * 300), "bytes"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(constraint: Constraint, reason: str) -> None:
    message = refusal(constraint)
    assert reason in message
    assert "cannot be used" in message
    assert len(message) < MAX_REASON_CHARS + 100
    assert "%json" not in message


def test_long_descriptions_and_many_patterns_that_are_the_same_are_no_load() -> None:
    date = "[0-9]{4}-[0-9]{2}-[0-9]{2}" * 10
    parts = {f"p{i}": {"type": "string", "pattern": date, "description": "b" * 200} for i in range(100)}
    schema = {"description": LONG, "properties": {**parts, "const": {"title": LONG}}, "required": [*parts]}
    assert byte_grammars().compile(Constraint.json_schema(schema))


def test_a_schema_that_is_not_strict_gets_what_can_be_enforced_and_is_told_the_rest() -> None:
    schema = {"type": "integer", "not": {"const": 3}}
    constraint = Constraint.json_schema(schema, strict=False)
    assert takes(constraint, "3")
    assert not takes(constraint, "x")
    (ignored,) = byte_grammars().compile(constraint).ignored
    assert "not" in ignored
    assert byte_grammars().compile(Constraint.json_object()).ignored == ()


def test_recursive_schemas_work() -> None:
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    }
    assert takes(Constraint.json_schema(tree), '{"v":1,"next":[{"v":2,"next":[]},{"v":3,"next":[{"v":4,"next":[]}]}]}')
    assert not takes(Constraint.json_schema(tree), '{"v":1,"next":[{"v":2}]}')


def test_a_long_chain_of_references_ends_no_process() -> None:
    """On a thread's usual stack it does: in a process of its own, so that the others would live to tell."""
    script = (
        "from tests.support.models import byte_grammars\n"
        "from tests.grammar.test_compiler import chain\n"
        "from kvstrata.errors import InvalidRequest\n"
        "from kvstrata.grammar.constraint import Constraint\n"
        "try:\n"
        "    byte_grammars().compile(Constraint.json_schema(chain(5000)))\n"
        "    print('compiled')\n"
        "except InvalidRequest as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "compiled" in done.stdout or "cannot be used" in done.stdout


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(module, "COMPILE_LIMIT_S", 0.05)
    monkeypatch.setattr(module, "_native", lambda *_: asked.wait())
    assert "takes longer than" in refusal(Constraint.regex("never seen before"))
    asked.set()


def test_work_apart_has_a_large_stack_and_others_their_own() -> None:
    before = threading.stack_size()

    def depth(left: int) -> int:
        return 0 if not left else 1 + depth(left - 1)

    assert CompilePool().run(lambda: depth(500), 10.0) == 500
    assert threading.stack_size() == before
    with pytest.raises(ZeroDivisionError):
        CompilePool().run(lambda: 1 // 0, 10.0)


@pytest.mark.parametrize("pool", [CompilePool(1, 2, place_limit_s=0.01), CompilePool(2, 1, place_limit_s=60)])
def test_where_no_place_is_free_a_request_is_told_to_come_again(pool: CompilePool) -> None:
    """Where it may wait for a place, and where as many wait already: at once."""
    loaded = byte_model()
    grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids, pool)
    begun, done = threading.Event(), threading.Event()
    busy = threading.Thread(target=pool.run, args=(lambda: (begun.set(), done.wait(30)), 30))
    busy.start()
    assert begun.wait(30)
    with pytest.raises(QueueFull, match="no place is free") as full:
        grammars.compile(Constraint.regex("[0-9]"), param="structured_outputs.regex")
    assert (full.value.status, full.value.code) == (429, "grammars_busy")
    done.set()
    busy.join(30)
    assert grammars.compile(Constraint.regex("[0-9]"))


def test_a_new_schema_that_comes_many_times_at_once_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, native = byte_model(), module._native
    grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids, CompilePool(1, 9, place_limit_s=60))
    compiled: list[str] = []

    def counted(tokens: Any, source: str) -> Any:
        compiled.append(source)
        return native(tokens, source)

    monkeypatch.setattr(module, "_native", counted)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: grammars.compile(Constraint.regex("[a-f]+")), range(8)))
    assert len(compiled) == 1
    assert all(each is made[0] for each in made)


def test_work_that_was_given_up_keeps_its_place() -> None:
    pool, done = CompilePool(1, 4, place_limit_s=0.01), threading.Event()
    with pytest.raises(TimeoutError):
        pool.run(done.wait, 0.01)
    with pytest.raises(CompilersBusy):
        pool.run(done.wait, 0.01)
    done.set()
    assert CompilePool(1, 4).run(lambda: 1, 30) == 1


def test_the_last_few_are_remembered() -> None:
    grammars = new_grammars()
    first = grammars.compile(Constraint.regex("0"))
    for i in range(1, module.MAX_REMEMBERED):
        grammars.compile(Constraint.regex(str(i)))
    assert grammars.compile(Constraint.regex("0")) is first
    grammars.compile(Constraint.regex("more"))
    assert grammars.compile(Constraint.regex("0")) is first
    second = grammars.compile(Constraint.regex("1"))
    assert grammars.compile(Constraint.regex("1")) is second


def test_a_grammar_is_compiled_anew_for_another_salt() -> None:
    grammars = new_grammars()
    first = grammars.compile(Constraint.regex("0"), salt="a")
    assert grammars.compile(Constraint.regex("0"), salt="a") is first
    assert grammars.compile(Constraint.regex("0"), salt="b") is not first


def test_many_threads_compile_and_follow_at_once() -> None:
    grammars = new_grammars()
    shared = Constraint.json_schema(PERSON)
    wrong: list[str] = []

    def work(number: int) -> None:
        for constraint in (shared, Constraint.regex(f"a{number}")):
            matcher = grammars.compile(constraint).matcher()
            text = '{"name": "x", "age": 1}' if constraint is shared else f"a{number}"
            if matcher.native.try_consume_tokens(ids_of(text)) != len(ids_of(text)):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.perf
def test_nothing_is_made_before_it_is_asked_for() -> None:
    began_s = time.thread_time()
    grammars = GrammarCompiler(tiny_tokenizer(), 97, [3])
    assert time.thread_time() - began_s < 0.1
    with pytest.raises(InvalidRequest, match="llguidance does not take its tokenizer"):
        grammars.compile(Constraint.json_object())


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
        GrammarCompiler(byte_tokenizer(), byte_model().vocab_size, []).compile(Constraint.json_object())


def test_a_slow_tokenizer_is_refused_when_it_is_asked_for() -> None:
    class Slow(PythonBackend):
        @property
        def vocab_size(self) -> int:
            return 3

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "c": 2}

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return max(0, "abc".find(token))

        def _convert_id_to_token(self, index: int) -> str:
            return "abc"[index]

    grammars = GrammarCompiler(TokenizerWrapper(Slow(eos_token="c")), 3, [2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="not a fast one"):
        grammars.compile(Constraint.json_object(), param="response_format")
    assert grammars.pieces("abc") == ["abc"]


def test_a_tokenizer_that_pads_and_cuts_still_works() -> None:
    padding = TokenizerWrapper(copy.deepcopy(byte_tokenizer()._tokenizer))
    backend = padding._tokenizer.backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    grammars = GrammarCompiler(padding, byte_model().vocab_size, byte_model().eos_ids)
    matcher = grammars.compile(Constraint.choice(["a longer text"])).matcher()
    ids = ids_of("a longer text")
    assert matcher.native.try_consume_tokens(ids) == len(ids)


def test_constraints_are_values() -> None:
    one, other = Constraint.choice(["a", "b"]), Constraint.choice(iter(["a", "b"]))
    assert one == other
    assert len({one, other, dataclasses.replace(one, strict=False)}) == 2


def test_ids_of_added_tokens_are_matched_in_a_grammar() -> None:
    for token in ("<tool_call>", "[TOOL_CALLS]", "[ARGS]"):
        constraint = Constraint.lark(f'start: <[{id_of(token)}]> "x"')
        assert takes(constraint, f"{token}x")
        assert not takes_ids(constraint, [id_ for char in token for id_ in ids_of(char)] + [id_of("x")])
