"""A hundred schemas at temperature 1, from a model of random weights, through the engine: what ends is valid."""

from __future__ import annotations

import datetime
import json
import threading
from dataclasses import dataclass, field

import jsonschema
import pytest

from kvstrata.bench.streams import running
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Event, Failed, Finished, Request, Sampling, TextDelta
from kvstrata.grammar.constraint import Constraint
from kvstrata.metrics import Metrics
from tests.byte_level import byte_grammars, byte_model, id_of
from tests.grammar.schemas import schemas

MAX_TOKENS = 400
# Blanks are allowed nearly everywhere, so a random model would write little else.
BIAS = tuple((id_of(blank), -6.0) for blank in (" ", "\n", "\t", "\r", "  "))


@dataclass
class Answer:
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
    """As RFC 3339 has it, where jsonschema knows an older time, or none without another package."""
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
def test_every_reply_that_ends_by_itself_is_valid(temperature: float) -> None:
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
    # A model that always takes what is likeliest may go round in circles where a schema is recursive.
    assert len(cut) <= (2 if temperature else 10)
