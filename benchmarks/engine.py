"""The engine beside mlx-lm's BatchGenerator: same model, same prompts, alternating in one process.

Decoding is timed while the batch is full: from the first token of the last sequence to the end of the first sequence.
Prefill is timed from submitting one prompt to its first token. Rates are medians over the rounds, ratios are medians of
the rounds' ratios.
"""

from __future__ import annotations

import random
import statistics
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from mlx_lm.generate import BatchGenerator

from benchmarks.common import (
    MAX_BATCH,
    Prompt,
    Rounds,
    Streams,
    TimedReply,
    command_line,
    greedy,
    random_prompt,
    run_app,
    running,
)
from benchmarks.random_model import RandomWeights, load_model
from kvstrata.bench.figures import Figure, Progress, in_turns, lay_out, median_ratio, silent
from kvstrata.cli.bench_options import Json, Model, numbers, say, show
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel

Replies = Sequence[TimedReply]

PREFILL_TOKENS = 512


@dataclass(frozen=True)
class EngineLoad:
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 64  # of the shortest prompt
    reply_tokens: int = 48


@dataclass(frozen=True)
class Comparison:
    ours_tokens_s: float
    mlx_lm_tokens_s: float
    ratio: float  # median of the rounds' ratios
    same_tokens: float  # share of tokens before the first difference (float32 ties may differ)


@dataclass(frozen=True)
class EngineFigures(Figure):
    batch: dict[str, Comparison]
    prefill: Comparison


def measure(
    loaded: LoadedModel, engine: Engine, load: EngineLoad, *, rounds: int = 5, progress: Progress = silent
) -> EngineFigures:
    rng = random.Random(0)
    by_batch = {}
    for size in load.batches:
        progress(f"batch {size}")
        prompts = [random_prompt(rng, loaded, load.prompt_tokens + 32 * i) for i in range(size)]
        by_batch[str(size)] = _compare(loaded, engine, prompts, load.reply_tokens, rounds, decode_tokens_s)
    progress(f"prefill of {PREFILL_TOKENS} tokens")
    prompts = [random_prompt(rng, loaded, PREFILL_TOKENS)]
    rate = lambda run: PREFILL_TOKENS / run[0].first_token_s  # noqa: E731
    return EngineFigures(by_batch, _compare(loaded, engine, prompts, 1, rounds, rate))


def _compare(
    loaded: LoadedModel,
    engine: Engine,
    prompts: Sequence[Prompt],
    reply_tokens: int,
    rounds: int,
    rate: Callable[[Replies], float],
) -> Comparison:
    runners = {"kvstrata": partial(run_ours, engine, prompts), "mlx-lm": partial(run_mlx_lm, loaded, prompts)}
    for run in runners.values():
        run(2)  # warm
    found = in_turns({name: partial(run, reply_tokens) for name, run in runners.items()}, rounds)
    ours, theirs = ([rate(run) for run in runs] for runs in found.values())
    same = min(_same_share(*runs) for runs in zip(*found.values(), strict=True))
    return Comparison(statistics.median(ours), statistics.median(theirs), median_ratio(ours, theirs), same)


def decode_tokens_s(run: Replies) -> float:
    all_began_s = max(reply.times[0] for reply in run)
    first_ended_s = min(reply.times[-1] for reply in run)
    num_between = sum(all_began_s < at_s <= first_ended_s for reply in run for at_s in reply.times)
    return num_between / (first_ended_s - all_began_s)


def run_ours(engine: Engine, prompts: Sequence[Prompt], reply_tokens: int) -> Replies:
    streams = Streams(engine)
    salt = uuid.uuid4().hex  # no hits from earlier rounds: mlx-lm computes all prompts, too
    for prompt in prompts:
        streams.start(greedy(prompt, reply_tokens, salt))
    streams.finish()
    return list(streams)


def run_mlx_lm(loaded: LoadedModel, prompts: Sequence[Prompt], reply_tokens: int) -> Replies:
    generator = BatchGenerator(loaded.module)
    run = [TimedReply() for _ in prompts]
    order = generator.insert([list(prompt) for prompt in prompts], [reply_tokens] * len(prompts))
    left = len(order)
    while left:
        for response in generator.next_generated():
            run[order.index(response.uid)].add([response.token])
            left -= response.finish_reason is not None
    generator.close()
    return run


def table(figures: EngineFigures) -> str:
    rows = {f"decode, batch {size}": row for size, row in figures.batch.items()} | {"prefill, 512": figures.prefill}
    return lay_out(
        rows.items(),
        [
            ("tokens/s", "<18", lambda row: row[0]),
            ("kvstrata", ">10.1f", lambda row: row[1].ours_tokens_s),
            ("mlx-lm", ">10.1f", lambda row: row[1].mlx_lm_tokens_s),
            ("ratio", ">8.2f", lambda row: row[1].ratio),
            ("same tokens", ">14.0%", lambda row: row[1].same_tokens),
        ],
    )


def _same_share(a: Replies, b: Replies) -> float:
    total = sum(len(reply.ids) for reply in a)
    return sum(_same_prefix(x.ids, y.ids) for x, y in zip(a, b, strict=True)) / total


def _same_prefix(a: list[int], b: list[int]) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


app = command_line()


@app.command()
def main(
    model: Model = None,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 48,
    prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the shortest prompt; each further one has 32 more.")
    ] = 64,
    rounds: Rounds = 3,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,8",
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Measure the engine beside mlx-lm's BatchGenerator: batch 1, batch 8, and the prefill of 512 tokens."""
    load = EngineLoad(numbers(batches, 1, MAX_BATCH), prompt_tokens, reply_tokens)
    loaded = load_model(model, random_weights=random_weights)
    # Prefill all prompts first, so that the whole batch decodes together, as in mlx-lm's generator.
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as engine:
        show(measure(loaded, engine, load, rounds=rounds, progress=say), table, as_json=as_json)


if __name__ == "__main__":
    run_app(app)
