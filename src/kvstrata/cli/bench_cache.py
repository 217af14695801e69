"""`kvstrata bench first-token|memory|decode|requantize|ladder`: figures of the cache itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvstrata.bench.first_token import FirstToken
    from kvstrata.bench.ladder import LadderRun
    from kvstrata.bench.requantize import Requantized

Model = Annotated[
    str | None, typer.Argument(help="Folder or Hugging Face id of a model.", show_default="the default model")
]
MIB = 1 << 20
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]


def first_token(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 4000,
    precision: Annotated[str, typer.Option(help="What KV is stored as: raw, planes:8 and so on.")] = "raw",
    slow_disk: Annotated[str, typer.Option(help="What the slow disk reads in a second.", metavar="size")] = "2MB",
    as_json: Json = False,
) -> None:
    """How soon the first token comes: nothing cached, in memory, on the disk after a restart, on a slow disk."""
    from kvstrata.backend import device
    from kvstrata.bench.first_token import measure
    from kvstrata.config import Size
    from kvstrata.models.load import load

    rows = measure(
        load(model),
        memory_bytes=int(device().memory_bytes * 0.75),
        prompt_tokens=prompt_tokens,
        precision=precision,
        slow_bytes_s=Size.parse(slow_disk).of(0),
    )
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else _first_token_table(rows))


def _first_token_table(rows: list[FirstToken]) -> str:
    width = max(len(row.case) for row in rows) + 2
    lines = [f"{'the prompt is':<{width}}{'cached':>14}{'seconds':>10}{'of cold':>9}"]
    for row in rows:
        cached = f"{row.cached_tokens}/{row.prompt_tokens}"
        lines.append(f"{row.case:<{width}}{cached:>14}{row.seconds:>10.2f}{row.ratio:>9.3f}")
    return "\n".join(lines)


def memory(
    tokens: Annotated[int, typer.Option(min=256, help="How far a sequence grows.")] = 4096, as_json: Json = False
) -> None:
    """Peak against held memory while caches grow, join and leave: ours beside mlx-lm's."""
    from kvstrata.bench.memory import measure, table

    rows = measure(tokens, progress=lambda what: typer.echo(f"{what} ...", err=True))
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else table(rows))


def decode(
    model: Model = None,
    context_tokens: Annotated[int, typer.Option(min=256, help="Tokens that are attended to.")] = 4096,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded in each round.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="How often to measure; medians are shown.")] = 3,
    precisions: Annotated[str, typer.Option(help="Of ours, with commas between.")] = "raw,planes:8,planes:4",
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Take a Qwen3-0.6B shape with random bf16 weights instead of MODEL."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Decoding over a long context: each precision, beside mlx-lm's plain and quantized caches."""
    from kvstrata.bench.decode import measure, table
    from kvstrata.bench.random_model import random_model
    from kvstrata.models.load import load

    rows = measure(
        random_model() if random_weights else load(model),
        context_tokens=context_tokens,
        reply_tokens=reply_tokens,
        rounds=rounds,
        precisions=[name.strip() for name in precisions.split(",")],
        progress=lambda what: typer.echo(f"{what} ...", err=True),
    )
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else table(rows))


def requantize(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Streams that run meanwhile.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=300, help="Tokens of each prompt.")] = 512,
    reply_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each reply.")] = 160,
    as_json: Json = False,
) -> None:
    """Step everything down to planes:8, then planes:4, under running streams: pauses, bytes, time."""
    from kvstrata.backend import device
    from kvstrata.bench.requantize import measure
    from kvstrata.models.load import load

    rows = measure(
        load(model),
        memory_bytes=int(device().memory_bytes * 0.75),
        streams=streams,
        prompt_tokens=prompt_tokens,
        reply_tokens=reply_tokens,
    )
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else _requantize_table(rows))


def _requantize_table(rows: list[Requantized]) -> str:
    head = (
        f"{'to':<10}{'longest pause':>15}{'said MiB':>10}{'freed MiB':>11}{'by MLX':>9}{'seconds':>9}{'of prefill':>12}"
    )
    lines = [head]
    for row in rows:
        pause = f"{row.longest_pause_steps:.1f} steps"
        said, freed, by_mlx = (n / MIB for n in (row.freed_said_bytes, row.freed_bytes, row.allocator_freed_bytes))
        lines.append(
            f"{row.precision:<10}{pause:>15}{said:>10.1f}{freed:>11.1f}{by_mlx:>9.1f}{row.seconds:>9.2f}{row.share:>12.1%}"
        )
    last = rows[-1]
    lines.append(f"{last.finished} of {last.streams} streams finished; {last.computed_again} prompt tokens again")
    return "\n".join(lines)


def ladder(
    model: Model = None,
    chats: Annotated[int, typer.Option(min=2, help="Conversations that come and come back.")] = 12,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each.")] = 3,
    turn_tokens: Annotated[int, typer.Option(min=16, help="Tokens that a turn adds.")] = 192,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 24,
    at_once: Annotated[int, typer.Option(min=1, max=16, help="Requests that run together.")] = 2,
    share: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="KV budget, of what the load needs at full precision.")
    ] = 0.25,
    as_json: Json = False,
) -> None:
    """A load that does not fit: stepping down beside evicting at full precision. Hit rates, failures, memory."""
    from kvstrata.bench.ladder import Load, measure
    from kvstrata.models.load import load

    what = Load(chats, turns, turn_tokens, reply_tokens, at_once)
    rows = measure(load(model), what, share=share, progress=lambda name: typer.echo(f"{name} ...", err=True))
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else _ladder_table(rows))


def _ladder_table(rows: list[LadderRun]) -> str:
    lines = [
        f"{'policy':<9}{'hit rate':>9}{'failed':>8}{'sampled MiB':>13}{'peak MiB':>10}{'limit MiB':>11}{'seconds':>9}"
    ]
    for row in rows:
        sampled, peak, limit = (n / MIB for n in (row.sampled_peak_bytes, row.peak_bytes, row.limit_bytes))
        memory = f"{sampled:>13.1f}{peak:>10.1f}{limit:>11.1f}"
        lines.append(f"{row.policy:<9}{row.hit_rate:>9.1%}{row.failed:>8}{memory}{row.seconds:>9.1f}")
    budget, needed = rows[0].budget_bytes / MIB, rows[0].needed_bytes / MIB
    lines.append(f"KV budget {budget:.1f} MiB; the load needs {needed:.1f} MiB at full precision")
    return "\n".join(lines)
