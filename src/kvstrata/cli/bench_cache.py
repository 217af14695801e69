"""`kvstrata bench first-token|spilling|memory|decode|graph|requantize|ladder`: figures of the cache itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.bench_options import MIB, Json, Model, RandomWeights, Rounds, chosen

if TYPE_CHECKING:
    from kvstrata.bench.first_token import FirstToken
    from kvstrata.bench.ladder import LadderRun
    from kvstrata.bench.requantize import Requantized
    from kvstrata.bench.spilling import Spilling


def first_token(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 4000,
    precision: Annotated[str, typer.Option(help="What KV is stored as: raw, planes:8 and so on.")] = "raw",
    slow_disk: Annotated[
        str, typer.Option(help="What slow disks read in a second, with commas between.", metavar="sizes")
    ] = "2MB,20MB",
    rounds: Rounds = 3,
    as_json: Json = False,
) -> None:
    """How soon the first token comes: without a cache, with one that has nothing, from memory, and from disks."""
    from kvstrata.backend import device
    from kvstrata.bench.first_token import measure
    from kvstrata.models.load import load
    from kvstrata.sizes import Size

    rows = measure(
        load(model),
        memory_bytes=int(device().memory_bytes * 0.75),
        prompt_tokens=prompt_tokens,
        precision=precision,
        slow_bytes_s=[Size.parse(speed.strip()).of(0) for speed in slow_disk.split(",")],
        rounds=rounds,
        progress=lambda what: typer.echo(f"{what} ...", err=True),
    )
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else _first_token_table(rows))


def _first_token_table(rows: list[FirstToken]) -> str:
    width = max(len(row.case) for row in rows) + 2
    lines = [f"{'the prompt is':<{width}}{'cached':>14}{'seconds':>10}{'ratio':>8}{'largest':>9}{'same reply':>12}"]
    for row in rows:
        cached = f"{row.cached_tokens}/{row.prompt_tokens}"
        line = f"{row.case:<{width}}{cached:>14}{row.seconds:>10.2f}{row.ratio:>8.3f}{row.largest_ratio:>9.3f}"
        lines.append(f"{line}{'yes' if row.is_same_reply else 'no':>12}")
    return "\n".join([*lines, "medians; ratio: to the same round without a cache, at most 1.05 whatever the disk"])


def spilling(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Streams that run meanwhile.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations that are spilled in each round.")] = 8,
    conversation_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 512,
    precision: Annotated[str, typer.Option(help="What KV is stored as: raw, planes:8 and so on.")] = "raw",
    rounds: Annotated[int, typer.Option(min=1, help="Windows of spilling, and as many without.")] = 12,
    as_json: Json = False,
) -> None:
    """What spilling to the disk does to running streams: time between two tokens with it and without."""
    from kvstrata.backend import device
    from kvstrata.bench.spilling import measure
    from kvstrata.models.load import load

    figures = measure(
        load(model),
        memory_bytes=int(device().memory_bytes * 0.75),
        streams=streams,
        conversations=conversations,
        conversation_tokens=conversation_tokens,
        precision=precision,
        rounds=rounds,
        progress=lambda what: typer.echo(f"{what} ...", err=True),
    )
    typer.echo(json.dumps(figures.as_json()) if as_json else _spilling_table(figures))


def _spilling_table(figures: Spilling) -> str:
    lines = [f"{'between two tokens':<20}{'p50 ms':>9}{'p99 ms':>9}"]
    for name, p50_s, p99_s in (
        ("nothing is spilled", figures.quiet_p50_s, figures.quiet_p99_s),
        ("while it spills", figures.spilling_p50_s, figures.spilling_p99_s),
    ):
        lines.append(f"{name:<20}{1e3 * p50_s:>9.1f}{1e3 * p99_s:>9.1f}")
    lines.append(f"{'ratio':<20}{figures.p50_ratio:>9.2f}{figures.p99_ratio:>9.2f}")
    spilled = f"{figures.spilled_bytes / MIB:.0f} MiB spilled in {figures.rounds} rounds"
    return "\n".join([*lines, f"{figures.streams} streams, {figures.num_intervals} intervals, {spilled}"])


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
    rounds: Rounds = 3,
    precisions: Annotated[str, typer.Option(help="Of ours, with commas between.")] = "raw,planes:8,planes:4",
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Decoding over a long context: each precision, beside mlx-lm's plain and quantized caches."""
    from kvstrata.bench.decode import measure, table

    rows = measure(
        chosen(model, random_weights=random_weights),
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
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Step everything down to planes:8, then planes:4, under running streams: pauses, bytes, time."""
    from kvstrata.backend import device
    from kvstrata.bench.requantize import measure

    rows = measure(
        chosen(model, random_weights=random_weights),
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


def graph(
    tokens: Annotated[
        str, typer.Option(help="Tokens that are attended to, with commas between.", metavar="tokens")
    ] = "1024,8192,32768",
    as_json: Json = False,
) -> None:
    """What one attention layer of a decode step asks of a Mac's GPU: operations, and bytes that they move."""
    from kvstrata.bench.graph import measure

    rows = measure([int(count) for count in tokens.split(",")])
    if as_json:
        typer.echo(json.dumps([row.as_json() for row in rows]))
        return
    lines = [f"{'over':<18}{'tokens':>8}{'operations':>12}{'MiB moved':>11}{'MiB stored':>12}{'ratio':>7}"]
    lines += [
        f"{row.case:<18}{row.tokens:>8}{row.primitives:>12}{row.nbytes / MIB:>11.1f}"
        f"{row.part_bytes / MIB:>12.1f}{row.ratio:>7.2f}"
        for row in rows
    ]
    typer.echo("\n".join([*lines, "32 heads, 8 of keys, 128 values each, bfloat16; views are not counted"]))
