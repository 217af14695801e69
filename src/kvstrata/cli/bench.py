"""`kvstrata bench`: figures about this machine, each against an honest opponent in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli import bench_compare, bench_quality, bench_serve
from kvstrata.cli.bench_options import Json, numbers, say, show, words

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
    as_json: Json = False,
) -> None:
    """How much of a trace's prompts would be found: kvstrata's policy, LRU, and the optimum that knows the future."""
    from kvstrata.bench import replay as figure
    from kvstrata.bench import trace as traced

    rows: list[Row] = []
    precisions = numbers(bits, 1, figure.FULL_BITS)
    chosen: list[PolicyName] = [policy for policy in figure.POLICIES if policy in policies.split(",")]
    loaded = [traced.load_trace(path) for path in traces or []] + ([traced.made_up(made_up)] if made_up else [])
    for trace in loaded:
        shares = [_share(part, trace, token_bytes) for part in budgets.split(",")]
        rows += figure.replay(trace, shares, precisions, policies=chosen, held_out=held_out, progress=say)
    if not rows:
        raise typer.BadParameter("Give a TRACE or --made-up 10000, and at least one of kvstrata, lru, optimal")
    if plot is not None:
        from kvstrata.bench.replay_plot import plot_replay

        plot_replay(rows, plot)
    show(rows, figure.table, as_json=as_json)


def _share(text: str, trace: Trace, token_bytes: int) -> float:
    """Of what all distinct blocks take at 16 bits."""
    from kvstrata.bench.trace import BLOCK_TOKENS
    from kvstrata.sizes import Size

    size = Size.parse(text.strip())
    if size.num_bytes is None:
        return (size.percent or 0.0) / 100
    return size.num_bytes / (trace.num_distinct * BLOCK_TOKENS * token_bytes)


app.command()(bench_serve.serve)
app.command()(bench_compare.compare)
app.command()(bench_quality.quality)
