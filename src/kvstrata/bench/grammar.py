"""What a grammar costs: decode steps of rows that are held to a schema beside steps of the same rows without one.

One engine, the same prompts, in turns. A step is the time between two tokens of a stream while all of them run; its
median counts. Replies differ, which no step's work depends on.
"""

from __future__ import annotations

import random
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstrata.bench.driver import Figure, Progress, in_turns, lay_out, median_ratio, silent
from kvstrata.bench.streams import Prompt, Streams, random_prompt
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Request, Sampling
from kvstrata.errors import KvstrataError
from kvstrata.grammar.compiler import Grammar, GrammarCompiler
from kvstrata.grammar.constraint import Constraint
from kvstrata.models.load import LoadedModel

PROMPT_TOKENS = 64
WARM_UP_TOKENS = 4
# Of a decode step, that grammars may add to it on two cores.
BOUND = 0.1

# Strings are bounded, so that replies get to every part of it, and the list is longer than any reply.
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["admin", "guest", "member"]},
        "active": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "role", "active", "tags", "address"],
    "additionalProperties": False,
}
PEOPLE = Constraint.json_schema({"type": "array", "items": PERSON, "minItems": 100_000})


@dataclass(frozen=True)
class GrammarCost(Figure):
    rows: int
    free_s: float  # a decode step without grammars
    held_s: float  # with one for each row
    cost: float  # of a step: median of the rounds' ratios, less 1

    def as_json(self) -> dict[str, Any]:
        more = {"cost_per_row": self.cost / self.rows, "bound": BOUND, "is_within_bound": self.cost <= BOUND}
        return {**super().as_json(), **more}


def measure(
    loaded: LoadedModel,
    engine: Engine,
    *,
    rows: Sequence[int] = (1, 4),
    reply_tokens: int = 96,
    rounds: int = 7,
    progress: Progress = silent,
) -> list[GrammarCost]:
    grammar = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids).compile(PEOPLE)
    rng = random.Random(0)
    return [
        _compare(
            engine,
            [random_prompt(rng, loaded, PROMPT_TOKENS) for _ in range(count)],
            grammar,
            reply_tokens,
            rounds,
            progress,
        )
        for count in rows
    ]


def _compare(
    engine: Engine, prompts: Sequence[Prompt], grammar: Grammar, reply_tokens: int, rounds: int, progress: Progress
) -> GrammarCost:
    cases = {"free": None, "held": grammar}
    for held in cases.values():
        _run(engine, prompts, held, WARM_UP_TOKENS)
    found = in_turns(
        {name: partial(_step_s, engine, prompts, held, reply_tokens) for name, held in cases.items()},
        rounds,
        lambda what: progress(f"{len(prompts)} rows, {what}"),
    )
    free, held = found.values()
    return GrammarCost(
        len(prompts), statistics.median(free), statistics.median(held), cost=median_ratio(held, free) - 1
    )


def _step_s(engine: Engine, prompts: Sequence[Prompt], grammar: Grammar | None, reply_tokens: int) -> float:
    """The usual time between two tokens while all rows decode."""
    streams = _run(engine, prompts, grammar, reply_tokens)
    all_began_s = max(stream.times[0] for stream in streams)
    first_ended_s = min(stream.times[-1] for stream in streams)
    gaps = [b - a for stream in streams for a, b in stream.gaps() if all_began_s <= a and b <= first_ended_s]
    if not gaps:
        raise KvstrataError("Some replies were over before others began. Give more --reply-tokens")
    return statistics.median(gaps)


def _run(engine: Engine, prompts: Sequence[Prompt], grammar: Grammar | None, reply_tokens: int) -> Streams:
    streams = Streams(engine)
    salt = uuid.uuid4().hex  # every round computes its prompts
    for prompt in prompts:
        # No stop ids: all replies have the same length.
        request = Request(uuid.uuid4().hex, prompt, reply_tokens, Sampling(temperature=0), salt=salt, grammar=grammar)
        streams.start(request)
    streams.finish()
    return streams


def table(rows: Sequence[GrammarCost]) -> str:
    return lay_out(
        rows,
        [
            ("rows", "<6", lambda row: row.rows),
            ("free, ms", ">10.2f", lambda row: row.free_s * 1000),
            ("held, ms", ">10.2f", lambda row: row.held_s * 1000),
            ("cost of a step", ">16.1%", lambda row: row.cost),
            ("for a row", ">12.1%", lambda row: row.cost / row.rows),
        ],
    )
