"""`kvstrata bench`: figures about this machine, each against an honest opponent in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli import bench_cache, bench_compare, bench_cpu, bench_fleet, bench_quality, bench_serve
from kvstrata.cli.bench_options import Json, Model, RandomWeights, Rounds, chosen, numbers, say, show, words

if TYPE_CHECKING:
    from kvstrata.bench.replay import PolicyName, Row
    from kvstrata.bench.trace import Trace

app = typer.Typer(
    help="Measure this machine. Each figure stands beside its opponent's, measured in the same run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

KV_CACHE_CODECS = ("raw", "affine:8", "planes:8", "affine:4", "planes:4", "planes:2")
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
    from kvstrata.bench.engine import Load, measure, table
    from kvstrata.bench.streams import running
    from kvstrata.engine.config import EngineLimits
    from kvstrata.engine.engine import Engine
    from kvstrata.metrics import Metrics

    load = Load(numbers(batches, 1, MAX_BATCH), prompt_tokens, reply_tokens)
    loaded = chosen(model, random_weights=random_weights)
    # Prompts get all they can use, so that the whole batch decodes together, as the other engine's does.
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as engine:
        show(measure(loaded, engine, load, rounds=rounds, progress=say), table, as_json=as_json)


@app.command()
def step(
    model: Model = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,8",
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 256,
    reply_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each reply.")] = 96,
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Where the time of a decode step goes, beside what this machine's memory and products could do."""
    from kvstrata.bench.step import measure, table
    from kvstrata.bench.streams import running
    from kvstrata.engine.config import EngineLimits
    from kvstrata.engine.engine import Engine
    from kvstrata.metrics import Metrics

    loaded = chosen(model, random_weights=random_weights)
    sizes = numbers(batches, 1, MAX_BATCH)
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as engine:
        show(measure(loaded, engine, sizes, prompt_tokens, reply_tokens, progress=say), table, as_json=as_json)


@app.command()
def server(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Streams at once.")] = 8,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 32,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """What HTTP costs: streams through a real server against the engine alone."""
    from kvstrata.bench.server import measure, table
    from kvstrata.models.load import load

    figures = measure(load(model), streams=streams, reply_tokens=reply_tokens, rounds=rounds)
    show(figures, table, as_json=as_json)


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
    from kvstrata.bench.kv_cache import measure, table

    show(measure(layers, seq_len, heads, head_dim, words(codecs)), table, as_json=as_json)


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
    disk_writes: Annotated[
        bool, typer.Option("--disk-writes", help="Tell what a disk cache would be written a day, and nothing else.")
    ] = False,
    as_json: Json = False,
) -> None:
    """How much of a trace's prompts would be found: kvstrata's policy, LRU, and the optimum that knows the future."""
    from kvstrata.bench import disk_writes as written
    from kvstrata.bench import replay as figure
    from kvstrata.bench import trace as traced

    rows: list[Row] = []
    precisions = numbers(bits, 1, figure.FULL_BITS)
    chosen: list[PolicyName] = [policy for policy in figure.POLICIES if policy in policies.split(",")]
    loaded = [traced.load_trace(path) for path in traces or []] + ([traced.made_up(made_up)] if made_up else [])
    if disk_writes:
        found = [
            row for each in loaded for row in written.measure(each, _sizes(budgets, each, token_bytes), token_bytes)
        ]
        show(found, written.table, as_json=as_json)
        return
    for trace in loaded:
        shares = [_share(part, trace, token_bytes) for part in budgets.split(",")]
        rows += figure.replay(trace, shares, precisions, policies=chosen, held_out=held_out, progress=say)
    if not rows:
        raise typer.BadParameter("Give a TRACE or --made-up 10000, and at least one of kvstrata, lru, optimal")
    if plot is not None:
        from kvstrata.bench.replay_plot import plot_replay

        plot_replay(rows, plot)
    show(rows, figure.table, as_json=as_json)


def _sizes(budgets: str, trace: Trace, token_bytes: int) -> list[int]:
    from kvstrata.bench.trace import BLOCK_TOKENS

    all_bytes = trace.num_distinct * BLOCK_TOKENS * token_bytes
    return [round(_share(part, trace, token_bytes) * all_bytes) for part in budgets.split(",")]


def _share(text: str, trace: Trace, token_bytes: int) -> float:
    """Of what all distinct blocks take at 16 bits."""
    from kvstrata.bench.trace import BLOCK_TOKENS
    from kvstrata.sizes import Size

    size = Size.parse(text.strip())
    if size.num_bytes is None:
        return (size.percent or 0.0) / 100
    return size.num_bytes / (trace.num_distinct * BLOCK_TOKENS * token_bytes)


@app.command("index")
def index_cost(
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, with commas between.")] = "10000,100000,1000000",
    as_json: Json = False,
) -> None:
    """What one operation of the index and of the eviction policy costs, with few entries and with many."""
    from kvstrata.bench.index_cost import measure, table

    show(measure(numbers(nodes, 100), progress=say), table, as_json=as_json)


@app.command()
def grammar(
    model: Model = None,
    rows: Annotated[str, typer.Option(help="Sequences that decode at once, with commas between.")] = "1,4",
    reply_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each reply.")] = 96,
    rounds: Rounds = 7,
    as_json: Json = False,
) -> None:
    """What a JSON schema costs: decode steps with every row held to one, beside the same rows without."""
    from kvstrata.bench.grammar import measure, table
    from kvstrata.bench.streams import running
    from kvstrata.engine.config import EngineLimits
    from kvstrata.engine.engine import Engine
    from kvstrata.metrics import Metrics
    from kvstrata.models.load import load

    loaded, counts = load(model), numbers(rows, 1, MAX_BATCH)
    # Prompts get all they can use, so that all rows decode together.
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as engine:
        found = measure(loaded, engine, rows=counts, reply_tokens=reply_tokens, rounds=rounds, progress=say)
    show(found, table, as_json=as_json)


app.command()(bench_cpu.cpu)
app.command()(bench_fleet.fleet)
app.command()(bench_serve.serve)
app.command()(bench_compare.compare)
app.command()(bench_compare.random_model)
app.command()(bench_quality.quality)
app.command()(bench_quality.layers)
app.command("first-token")(bench_cache.first_token)
app.command()(bench_cache.spilling)
app.command()(bench_cache.disk)
app.command()(bench_cache.memory)
app.command()(bench_cache.decode)
app.command()(bench_cache.graph)
app.command()(bench_cache.codecs)
app.command()(bench_cache.requantize)
app.command()(bench_cache.ladder)
app.command("prefill-share")(bench_cache.prefill_share)
