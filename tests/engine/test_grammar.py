"""Replies under a grammar: beside free replies, preempted, after thinking, cut, cancelled and failed."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.engine import runner as runner_module
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Failed, Request, Sampling
from kvstrata.engine.sampling import SampledTokens
from kvstrata.grammar.compiler import Grammar, GrammarCompiler
from kvstrata.grammar.constraint import Constraint
from kvstrata.grammar.matcher import Matcher, TokenMasks
from kvstrata.metrics import Metrics
from tests.engine.drive import Client, Drive
from tests.support.models import byte_grammars, byte_model, byte_tokenizer, id_of, ids_of

ROW = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n", "s"]}
ENDLESS = Constraint.json_schema({"type": "array", "items": {**ROW, "additionalProperties": False}, "minItems": 10_000})
DIGITS = Constraint.regex("[0-9]{1,4}(,[0-9]{1,4})*")
# After the first brace the grammar has more alternatives than the parser accepts.
TOO_WIDE = Constraint.json_schema(
    {
        "anyOf": [
            {
                "properties": {f"a{j}": {"type": "integer"} for j in range(20)},
                "required": [f"a{i % 20}"],
                "type": "object",
            }
            for i in range(300)
        ]
    }
)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


def grammar(constraint: Constraint) -> Grammar:
    return byte_grammars().compile(constraint)


def submit(drive: Drive, seed: int, constraint: Constraint | None, **fields: Any) -> Client:
    sampling = fields.pop("sampling", Sampling(temperature=1.0, seed=seed, num_logprobs=2))
    length, max_tokens = fields.pop("length", 5 + 11 * seed), fields.pop("max_tokens", 24)
    constrained = None if constraint is None else grammar(constraint)
    stop_ids = byte_model().eos_ids if constraint else frozenset[int]()
    return drive.submit(
        prompt(length, seed), max_tokens, sampling, **{"stop_ids": stop_ids, "grammar": constrained, **fields}
    )


def alone(seed: int, constraint: Constraint | None, architecture: str = "llama", **fields: Any) -> Client:
    drive = Drive(byte_model(architecture))
    client = submit(drive, seed, constraint, **fields)
    drive.run()
    return client


def assert_same(client: Client, expected: Client) -> None:
    assert client.ids == expected.ids
    assert client.text == expected.text
    found, wanted = ([row.logprob for row in each.logprobs] for each in (client, expected))
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (Constraint.regex("[a-f]{3,6}-[0-9]{2}"), lambda text: re.fullmatch("[a-f]{3,6}-[0-9]{2}", text)),
        (Constraint.choice(["yes", "no", "日本"]), lambda text: text in ("yes", "no", "日本")),
        (Constraint.lark('start: X ("+" X)~0..3\nX: /[xyz]/'), lambda text: re.fullmatch(r"[xyz](\+[xyz]){0,3}", text)),
        (Constraint.json_schema({"enum": [1, "a"]}), lambda text: json.loads(text) in (1, "a")),
    ],
)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.5}, {"top_k": 1}, {"top_p": 0.1, "min_p": 0.5}]
)
def test_reply_follows_its_constraint(
    constraint: Constraint, fits: Callable[[str], object], sampling: dict[str, Any]
) -> None:
    for seed in range(3):
        client = alone(seed, constraint, sampling=Sampling(**{"seed": seed, **sampling}), max_tokens=60)
        assert client.finished.reason == "stop"
        assert fits(client.text), client.text


def test_penalties_and_bias_do_not_override_a_grammar() -> None:
    bias = ((id_of("7"), -100.0), (id_of("q"), 100.0))
    sampling = Sampling(temperature=1.0, seed=1, logit_bias=bias, repetition_penalty=1.5, frequency_penalty=1.0)
    assert alone(1, Constraint.regex("7{9}"), sampling=sampling).text == "7777777" + "77"


@pytest.mark.parametrize(
    ("architecture", "limits"),
    [
        ("llama", EngineLimits()),
        *(
            (name, EngineLimits(max_running=5, prefill_chunk_tokens=16))
            for name in ("llama", "qwen3_next", "deepseek_v3")
        ),
    ],
)
def test_constrained_and_free_rows_get_the_same_replies_in_a_batch(architecture: str, limits: EngineLimits) -> None:
    drive = Drive(byte_model(architecture), limits)
    asked: list[Constraint | None] = [None, ENDLESS, None, DIGITS, Constraint.json_object(), None]
    greedy = Sampling(temperature=0, num_logprobs=2)
    fields = [{"sampling": greedy} if seed % 2 else {} for seed in range(len(asked))]
    clients = []
    for seed, constraint in enumerate(asked):
        clients.append(submit(drive, seed, constraint, **fields[seed]))
        for _ in range(3):
            drive.core.executor.step()
    drive.run()
    for seed, client in enumerate(clients):
        assert_same(client, alone(seed, asked[seed], architecture, **fields[seed]))
    assert clients[1].text.startswith("[")
    assert re.fullmatch("[0-9,]+", clients[3].text)


def test_logprobs_of_a_constrained_reply_are_those_of_the_model() -> None:
    constrained, free = alone(1, DIGITS).logprobs[0], alone(1, None, max_tokens=1).logprobs[0]
    # The most likely tokens, allowed or not, and the sampled token.
    assert [id_ for id_, _ in constrained.top] == [id_ for id_, _ in free.top]
    assert [value for _, value in constrained.top] == pytest.approx([value for _, value in free.top], abs=1e-4)
    everything = Sampling(temperature=1.0, seed=1, num_logprobs=byte_model().vocab_size)
    by_id = dict(alone(1, None, max_tokens=1, sampling=everything).logprobs[0].top)
    assert constrained.logprob == pytest.approx(by_id[constrained.id], abs=1e-4)


def test_preempted_constrained_reply_resumes_unchanged() -> None:
    budget = Drive(byte_model()).budget
    kv_bytes = 2 * budget.fixed_bytes + 150 * budget.token_bytes
    drive = Drive(byte_model(), EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes)
    clients = [submit(drive, seed, ENDLESS, length=30, max_tokens=70) for seed in range(2)]
    drive.run()
    assert drive.num_preempted() >= 1
    for seed, client in enumerate(clients):
        assert_same(client, alone(seed, ENDLESS, length=30, max_tokens=70))


def test_matcher_consumes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    consumed: dict[int, list[int]] = {}
    consume = Matcher.consume

    def counting(self: Matcher, place: int, token: int) -> None:
        consume(self, place, token)
        consumed.setdefault(id(self), []).append(token)

    monkeypatch.setattr(Matcher, "consume", counting)
    budget = Drive(byte_model()).budget
    kv_bytes = 2 * budget.fixed_bytes + 150 * budget.token_bytes
    drive = Drive(byte_model(), EngineLimits(buffer_step_tokens=16), kv_bytes=kv_bytes)
    clients = [submit(drive, seed, ENDLESS, length=30, max_tokens=60) for seed in range(2)]
    kept = []  # keeps matchers alive, so that no two have the same id
    while not drive.core.executor.is_idle:
        drive.core.executor.step()
        kept += [sequence._matcher for sequence in drive.core.sequences.all]
    # No token follows the last token of a reply, so the matcher does not consume it.
    assert sorted(consumed.values()) == sorted(client.ids[:-1] for client in clients)


def test_grammar_begins_after_thinking() -> None:
    after = tuple(ids_of("</think>"))
    bias = ((after[0], 2.5),)
    sampling = Sampling(temperature=1.0, seed=2, logit_bias=bias)
    clients = [
        alone(seed, Constraint.regex("[0-9]{3}"), grammar_after=after, sampling=sampling, max_tokens=200)
        for seed in range(4)
    ]
    for client in clients:
        assert client.finished.reason == "stop"
        thoughts, _, answer = client.text.rpartition("</think>")
        assert re.fullmatch("[0-9]{3}", answer)
        assert not thoughts or not re.fullmatch("[0-9]*", thoughts)
    assert any(len(client.text) > len("</think>") + 6 for client in clients)


def test_thinking_is_not_constrained() -> None:
    never = (id_of("<s>"), id_of("[ARGS]"), id_of("<s>"))
    assert_same(alone(3, DIGITS, grammar_after=never), alone(3, DIGITS, grammar=None))


def test_stop_string_ends_a_constrained_reply() -> None:
    whole = alone(2, ENDLESS)
    cut_at = whole.text[6:8]
    client = alone(2, ENDLESS, stop=(cut_at,))
    assert client.finished.reason == "stop"
    assert client.text == whole.text[: whole.text.index(cut_at)]


def test_reply_cut_by_length_is_a_prefix_of_its_grammar() -> None:
    client = alone(2, ENDLESS, max_tokens=17)
    assert client.finished.reason == "length"
    assert len(client.ids) == 17
    assert_same(client, alone(2, ENDLESS, max_tokens=17))
    matcher = grammar(ENDLESS).matcher()
    assert matcher.native.try_consume_tokens(client.ids) == 17


def test_cancelled_constrained_request_changes_no_other_reply() -> None:
    drive = Drive(byte_model())
    gone, stays, free = submit(drive, 1, ENDLESS), submit(drive, 2, DIGITS), submit(drive, 3, None)
    while len(gone.ids) < 5:
        drive.core.executor.step()
    drive.core.executor.end_request(gone.request.id)
    drive.run()
    assert gone.finished.reason == "cancelled"
    assert_same(stays, alone(2, DIGITS))
    assert_same(free, alone(3, None))


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "gemma3_text"])
def test_grammar_beyond_the_parser_limits_fails_its_own_request_only(architecture: str) -> None:
    drive = Drive(byte_model(architecture))
    stays = submit(drive, 2, DIGITS)
    for _ in range(4):
        drive.core.executor.step()
    bad, free = submit(drive, 1, TOO_WIDE), submit(drive, 3, None)
    drive.run()
    assert isinstance(bad.end, Failed)
    assert bad.end.reason == "grammar"
    assert "could not be followed" in bad.end.message
    assert "items" in bad.end.message
    assert bad.text == "{"
    assert_same(stays, alone(2, DIGITS, architecture))
    assert_same(free, alone(3, None, architecture))


@pytest.mark.parametrize("is_known", [True, False], ids=["known tokens", "new tokens"])
@pytest.mark.parametrize("architecture", ["qwen3_next", "gemma3_text"])
def test_failed_grammar_caches_no_token_beyond_its_reply(architecture: str, is_known: bool) -> None:
    """The pending step has read a token beyond the reply: recurrent states are one token ahead of the ids."""
    drive = Drive(byte_model(architecture))
    begin, rest = [*prompt(40), id_of("{")], prompt(30, seed=5)
    if is_known:
        drive.submit([*begin, *rest], 4)
        drive.run()
    bad = drive.submit(begin[:-1], 24, grammar=grammar(TOO_WIDE), stop_ids=byte_model().eos_ids)
    drive.run()
    assert isinstance(bad.end, Failed)
    again = drive.submit([*begin, *rest[:2]], 12)
    drive.run()
    fresh = Drive(byte_model(architecture))
    expected = fresh.submit([*begin, *rest[:2]], 12)
    fresh.run()
    assert_same(again, expected)


@pytest.mark.parametrize(
    ("of", "operation", "calls"), [(Matcher, "consume", [3]), (TokenMasks, "fill", [2, 3]), (Grammar, "matcher", [1])]
)
def test_exception_in_a_grammar_fails_its_own_request_only(
    of: type, operation: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(2, DIGITS, length=31), alone(3, None)]
    done, raised = getattr(of, operation), itertools.count(1)

    def fail(*given: Any) -> Any:
        if next(raised) in calls:
            raise RuntimeError("defect")
        return done(*given)

    drive = Drive(byte_model())
    monkeypatch.setattr(of, operation, fail)
    bad, stays, free = submit(drive, 1, ENDLESS, length=30), submit(drive, 2, DIGITS, length=31), submit(drive, 3, None)
    drive.run()
    assert isinstance(bad.end, Failed)
    assert_same(stays, expected[0])
    assert_same(free, expected[1])


def test_batch_without_grammars_makes_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[object] = []
    sample = runner_module.sample

    def watched(logits: mx.array, samplers: Any, allowed: Any = None) -> SampledTokens:
        masks.append(allowed)
        return sample(logits, samplers, allowed)

    monkeypatch.setattr(runner_module, "sample", watched)
    monkeypatch.setattr(TokenMasks, "fill", lambda *_: pytest.fail("no row has a grammar"))
    drive = Drive(byte_model())
    clients = [submit(drive, seed, None) for seed in range(3)]
    drive.run()
    assert all(client.finished for client in clients)
    assert masks
    assert all(allowed is None for allowed in masks)


def test_constrained_pass_is_started_before_the_pending_step_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computes the pass while the host makes the masks."""
    done: list[str] = []
    forward, read, fill = runner_module.ModelRunner._forward, SampledTokens.read, TokenMasks.fill
    monkeypatch.setattr(runner_module.ModelRunner, "_forward", lambda *a: (done.append("forward"), forward(*a))[1])
    monkeypatch.setattr(SampledTokens, "read", lambda *a: (done.append("read"), read(*a))[1])
    monkeypatch.setattr(TokenMasks, "fill", lambda *a: (done.append("mask"), fill(*a))[1])
    drive = Drive(byte_model())
    submit(drive, 1, ENDLESS)
    submit(drive, 2, None)
    while len(done) < 60:
        drive.core.executor.step()
    # The pending step is read for the masks, then for the replies.
    assert done[-20:].count("forward") == 5
    at = max(place for place, what in enumerate(done[:-4]) if what == "forward")
    assert done[at : at + 4] == ["forward", "read", "mask", "read"]
    drive.core.fail_all("enough")


def test_submit_refuses_a_grammar_of_another_model() -> None:
    other = GrammarCompiler(byte_tokenizer(), byte_model().vocab_size + 1, byte_model().eos_ids)
    engine = Engine(byte_model(), EngineLimits(), Metrics())
    engine.start()
    try:
        with pytest.raises(ValueError, match="another model"):
            engine.submit(Request("r", (1, 2), 4, grammar=other.compile(DIGITS)), lambda _: None)
    finally:
        engine.stop()
