"""`kvstrata bench`: figures about this machine, each against an honest opponent in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli import bench_cache, bench_quality, bench_sharing
from kvstrata.cli.bench_options import MIB, Json, Model, RandomWeights, Rounds, chosen

if TYPE_CHECKING:
    from kvstrata.bench.engine import EngineFigures
    from kvstrata.bench.index_cost import IndexCost
    from kvstrata.bench.kv_cache import CodecFigures
    from kvstrata.bench.replay import PolicyName, Row
    from kvstrata.bench.trace import Trace

app = typer.Typer(
    help="Measure this machine. Each figure stands beside its opponent's, measured in the same run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

KV_CACHE_CODECS = ("raw", "affine:8", "planes:8", "affine:4", "rotated:4", "planes:4", "planes:2")
MAX_BATCH = 16  # what the engine runs at once by default


@app.command()
def engine(
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
    """The engine beside mlx-lm's BatchGenerator: batch 1, batch 8, and the prefill of 512 tokens."""
    from kvstrata.bench.engine import compare
    from kvstrata.engine.engine import Engine
    from kvstrata.engine.limits import Limits
    from kvstrata.metrics import Metrics

    loaded = chosen(model, random_weights=random_weights)
    # Prompts get all they can use, so that the whole batch decodes together, as the other engine's does.
    running = Engine(loaded, Limits(prefill_share=1.0), Metrics())
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
    from kvstrata.bench.server import measure
    from kvstrata.models.load import load

    figures = measure(load(model), streams=streams, reply_tokens=reply_tokens, rounds=rounds)
    line = f"{figures.streams} streams: engine alone {figures.engine_tokens_s:.1f} tokens/s, over HTTP "
    line += f"{figures.http_tokens_s:.1f}, overhead {figures.overhead:.1%}"
    typer.echo(json.dumps(figures.as_json()) if as_json else line)


@app.command("kv-cache")
def kv_cache(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Key heads of a layer.")] = 8,
    head_dim: Annotated[int, typer.Option(min=16, help="Values of a key.")] = 128,
    codecs: Annotated[str, typer.Option(help="Precisions, with commas between.")] = ",".join(KV_CACHE_CODECS),
    as_json: Json = False,
) -> None:
    """What each precision takes, loses and costs on given shapes (synthetic keys with outlier channels)."""
    from kvstrata.bench.kv_cache import measure

    rows = measure(layers, seq_len, heads, head_dim, [name.strip() for name in codecs.split(",")])
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else _kv_cache_table(rows))


def _kv_cache_table(rows: list[CodecFigures]) -> str:
    head = f"{'precision':<12}{'MiB':>9}{'allocated':>11}{'ratio':>7}{'bits':>7}"
    head += f"{'value err':>11}{'score err':>11}{'encode s':>10}{'decode s':>10}"
    lines = [head]
    for row in rows:
        line = f"{row.codec:<12}{row.nbytes / MIB:>9.2f}{row.allocated_bytes / MIB:>11.2f}{row.ratio:>7.2f}"
        line += f"{row.bits_per_value:>7.2f}{row.value_error:>11.4f}{row.score_error:>11.4f}"
        lines.append(line + f"{row.encode_s:>10.3f}{row.decode_s:>10.3f}")
    return "\n".join([*lines, f"ratio: to 16 bits ({rows[0].full_bytes / MIB:.2f} MiB)"])


@app.command()
def replay(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Request traces: .jsonl or .jsonl.gz with timestamp (ms) and hash_ids (512 tokens each)."),
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Shares of all distinct blocks, or sizes such as 8GiB, with commas between.")
    ] = "1%,2%,5%,10%,20%",
    bits: Annotated[str, typer.Option(help="Precisions that blocks are stored at, with commas between.")] = "16,8,4",
    token_bytes: Annotated[
        int,
        typer.Option(min=1, help="Bytes of a token at 16 bits, for budgets that are sizes (default: an 8 B model)."),
    ] = 131072,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Count the second half of each trace only; the first one warms the store."),
    ] = False,
    made_up: Annotated[int, typer.Option(min=0, help="Also replay so many made-up requests.")] = 0,
    policies: Annotated[str, typer.Option(help="Which of kvstrata, lru, optimal.")] = "kvstrata,lru,optimal",
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG, SVG) here.", show_default="none")] = None,
    as_json: Json = False,
) -> None:
    """How much of a trace's prompts would be found: kvstrata's policy, LRU, and the optimum that knows the future."""
    from kvstrata.bench import replay as figure
    from kvstrata.bench import trace as traced

    rows: list[Row] = []
    precisions = _bits(bits)
    chosen: list[PolicyName] = [policy for policy in figure.POLICIES if policy in policies.split(",")]
    for trace in [traced.load_trace(path) for path in traces or []] + ([traced.made_up(made_up)] if made_up else []):
        shares = [_share(part, trace, token_bytes) for part in budgets.split(",")]
        rows += figure.replay(
            trace,
            shares,
            precisions,
            policies=chosen,
            held_out=held_out,
            progress=lambda what: typer.echo(f"{what} ...", err=True),
        )
    if not rows:
        raise typer.BadParameter("Give a TRACE or --made-up 10000, and at least one of kvstrata, lru, optimal")
    if plot is not None:
        from kvstrata.bench.replay_plot import plot_replay

        plot_replay(rows, plot)
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else _replay_table(rows))


def _share(text: str, trace: Trace, token_bytes: int) -> float:
    """Of what all distinct blocks take at 16 bits."""
    from kvstrata.bench.trace import BLOCK_TOKENS
    from kvstrata.sizes import Size

    size = Size.parse(text.strip())
    if size.num_bytes is None:
        return (size.percent or 0.0) / 100
    return size.num_bytes / (trace.num_distinct * BLOCK_TOKENS * token_bytes)


def _bits(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 16 for part in parts):
        raise typer.BadParameter(f"'{text}' is not a list of numbers from 1 to 16, such as 16,8,4")
    return tuple(int(part) for part in parts)


def _replay_table(rows: list[Row]) -> str:
    policies = list(dict.fromkeys(row.policy for row in rows))
    head = f"{'trace':<22}{'budget':>8}{'bits':>6}{'blocks':>9}" + "".join(f"{policy:>10}" for policy in policies)
    lines = [head + (f"{'above lru':>20}" if {"kvstrata", "lru"} <= set(policies) else "")]
    for at in range(0, len(rows), len(policies)):
        first, *_ = line = rows[at : at + len(policies)]
        found = "".join(f"{row.hit_rate:>10.4f}" for row in line)
        above = "".join(
            f"{row.above_lru:>+11.4f} ±{row.above_lru_error:.4f}" for row in line if row.above_lru is not None
        )
        lines.append(f"{first.trace:<22}{first.budget:>8.2%}{first.bits:>6}{first.budget_blocks:>9}{found}{above}")
    return "\n".join(lines)


def _above_lru(row: Row) -> str:
    return "" if row.above_lru is None else f"{row.above_lru:>+11.4f} ±{row.above_lru_error:.4f}"


@app.command("index")
def index_cost(
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, with commas between.")] = "10000,100000,1000000",
    as_json: Json = False,
) -> None:
    """What one operation of the index and of the eviction policy costs, with few entries and with many."""
    from kvstrata.bench.index_cost import measure

    sizes = [part.strip() for part in nodes.split(",")]
    if not all(size.isdigit() and int(size) >= 100 for size in sizes):
        raise typer.BadParameter(f"'{nodes}' is not a list of numbers from 100 on, such as 10000,100000")
    rows = measure([int(size) for size in sizes], progress=lambda what: typer.echo(f"{what} ...", err=True))
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else _index_table(rows))


def _index_table(rows: list[IndexCost]) -> str:
    head = f"{'nodes':>9}{'match':>9}{'insert':>9}{'add':>9}{'evict':>9}{'match 100k':>12}{'insert 100k':>13}"
    lines = [head + f"{'bytes/node':>12}"]
    for row in rows:
        line = f"{row.num_nodes:>9}{row.match_us:>9.1f}{row.insert_us:>9.1f}{row.add_us:>9.1f}{row.evict_us:>9.1f}"
        lines.append(line + f"{row.long_match_us:>12.1f}{row.long_insert_us:>13.1f}{row.node_bytes:>12.0f}")
    return "\n".join([*lines, "microseconds, medians; 100k: a prompt of 100,000 tokens"])


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


app.command()(bench_quality.quality)
app.command()(bench_quality.layers)
app.command("first-token")(bench_cache.first_token)
app.command()(bench_cache.spilling)
app.command()(bench_cache.memory)
app.command()(bench_cache.decode)
app.command()(bench_cache.graph)
app.command()(bench_cache.requantize)
app.command()(bench_cache.ladder)
app.command("prefill-share")(bench_sharing.prefill_share)
