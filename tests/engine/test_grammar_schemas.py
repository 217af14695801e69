"""Replies of a model with random weights under a hundred schemas: each complete reply is valid."""

from __future__ import annotations

import datetime
import json
import threading
from dataclasses import dataclass, field

import jsonschema
import pytest

from benchmarks.common import running
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Event, Failed, Finished, Request, Sampling, TextDelta
from kvstrata.grammar.constraint import Constraint
from kvstrata.metrics import Metrics
from tests.grammar.schemas import schemas
from tests.support.models import byte_grammars, byte_model, id_of

MAX_TOKENS = 400
# Most schemas allow blanks nearly everywhere, so a random model would write little else.
BIAS = tuple((id_of(blank), -6.0) for blank in (" ", "\n", "\t", "\r", "  "))


@dataclass
class Answer:
    """Collects the text and the end of a reply."""

    text: str = ""
    end: Finished | Failed | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def sink(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.text += event.text
        elif isinstance(event, Finished | Failed):
            self.end = event
            self.ended.set()


def request(name: str, number: int, temperature: float) -> Request:
    constraint = Constraint.json_schema(schemas()[name])
    return Request(
        id=name,
        prompt=tuple((7 * number + i) % 250 for i in range(9)),
        max_tokens=MAX_TOKENS,
        sampling=Sampling(temperature=temperature, seed=number, logit_bias=BIAS),
        stop_ids=byte_model().eos_ids,
        grammar=byte_grammars().compile(constraint),
    )


def formats() -> jsonschema.FormatChecker:
    """Return a checker with the times of RFC 3339, which jsonschema lacks or checks by an older standard."""
    checker = jsonschema.FormatChecker()

    @checker.checks("time", raises=ValueError)
    def is_time(text: object) -> bool:
        return datetime.time.fromisoformat(str(text).upper().replace(":60", ":59")).tzinfo is not None

    @checker.checks("date-time", raises=ValueError)
    def is_date_time(text: object) -> bool:
        return datetime.datetime.fromisoformat(str(text).upper().replace(":60", ":59")).tzinfo is not None

    assert {"date", "email", "ipv4", "uuid"} <= set(checker.checkers)
    return checker


def is_valid(schema: dict[str, object], text: str) -> bool:
    checker = jsonschema.Draft202012Validator(schema, format_checker=formats())
    return checker.is_valid(json.loads(text))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_replies_that_the_model_ends_are_valid(temperature: float) -> None:
    answers = {name: Answer() for name in schemas()}
    with running(Engine(byte_model(), EngineLimits(), Metrics())) as engine:
        for number, (name, answer) in enumerate(answers.items()):
            engine.submit(request(name, number, temperature), answer.sink)
        assert all(answer.ended.wait(120) for answer in answers.values())
    ends = {name: answer.end.reason for name, answer in answers.items() if answer.end}
    assert set(ends.values()) <= {"stop", "length"}
    cut = [name for name, reason in ends.items() if reason == "length"]
    print(f"temperature {temperature}: {len(ends) - len(cut)} of {len(ends)} ended by themselves; cut by length: {cut}")
    invalid = {name: answers[name].text for name in answers if name not in cut}
    invalid = {name: text for name, text in invalid.items() if not is_valid(schemas()[name], text)}
    assert not invalid
    # A greedy model may loop for ever in a recursive schema.
    assert len(cut) <= (2 if temperature else 10)
