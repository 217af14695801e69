"""`kvstrata bench`: figures about this machine, each against an honest opponent in the same run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvstrata.bench.engine import EngineFigures

app = typer.Typer(
    help="Measure this machine. Each figure stands beside its opponent's, measured in the same run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MAX_BATCH = 16  # what the engine runs at once by default

Model = Annotated[
    str | None, typer.Argument(help="Folder or Hugging Face id of a model.", show_default="the default model")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often to measure; medians are shown.")]


@app.command()
def engine(
    model: Model = None,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 48,
    prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the shortest prompt; each further one has 32 more.")
    ] = 64,
    rounds: Rounds = 3,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,8",
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Take a Qwen3-0.6B shape with random bf16 weights instead of MODEL."),
    ] = False,
    as_json: Json = False,
) -> None:
    """The engine beside mlx-lm's BatchGenerator: batch 1, batch 8, and the prefill of 512 tokens."""
    from kvstrata.bench.engine import compare
    from kvstrata.bench.random_model import random_model
    from kvstrata.engine.engine import Engine
    from kvstrata.engine.limits import Limits
    from kvstrata.metrics import Metrics
    from kvstrata.models.load import load

    loaded = random_model() if random_weights else load(model)
    running = Engine(loaded, Limits(), Metrics())
    running.start()
    try:
        figures = compare(
            loaded,
            running,
            batches=_sizes(batches),
            prompt_tokens=prompt_tokens,
            reply_tokens=reply_tokens,
            rounds=rounds,
            progress=lambda what: typer.echo(f"measuring {what} ...", err=True),
        )
    finally:
        running.stop()
    typer.echo(json.dumps(figures.as_json()) if as_json else _table(figures))


@app.command()
def server(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Streams at once.")] = 8,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 32,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """What HTTP costs: streams through a real server against the engine alone."""
    from kvstrata.backend import device
    from kvstrata.bench.server import measure
    from kvstrata.models.load import load

    figures = measure(
        load(model), memory_bytes=device().memory_bytes, streams=streams, reply_tokens=reply_tokens, rounds=rounds
    )
    line = f"{figures.streams} streams: engine alone {figures.engine_tokens_s:.1f} tokens/s, over HTTP "
    line += f"{figures.http_tokens_s:.1f}, overhead {figures.overhead:.1%}"
    typer.echo(json.dumps(figures.as_json()) if as_json else line)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdigit() and 0 < int(size) <= MAX_BATCH for size in sizes):
        raise typer.BadParameter(f"'{text}' is not a list of numbers from 1 to {MAX_BATCH}, such as 1,8")
    return tuple(int(size) for size in sizes)


def _table(figures: EngineFigures) -> str:
    rows = {f"decode, batch {size}": row for size, row in figures.batch.items()} | {"prefill, 512": figures.prefill}
    lines = [f"{'tokens/s':<18}{'kvstrata':>10}{'mlx-lm':>10}{'ratio':>8}{'same tokens':>14}"]
    for name, row in rows.items():
        lines.append(
            f"{name:<18}{row.ours_tokens_s:>10.1f}{row.mlx_lm_tokens_s:>10.1f}{row.ratio:>8.2f}{row.same_tokens:>13.0%}"
        )
    return "\n".join(lines)
