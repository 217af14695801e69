"""`kvstrata bench fleet`: request traces through many replicas, simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.bench_options import Json, numbers, say, show, words

if TYPE_CHECKING:
    from kvstrata.bench.fleet_policies import RoutingName

ALL_ROUTINGS = "random,round-robin,two,session,prefix,pooled"


def fleet(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Request traces: .jsonl or .jsonl.gz with timestamp (ms) and hash_ids (512 tokens each)."),
    ] = None,
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, with commas between.")] = "1,2,4,8,16,32,64",
    routing: Annotated[
        str,
        typer.Option(
            help="Which of random, round-robin, two (the less busy of two drawn), session, prefix (kvstrata's router), "
            "pooled (one machine with everything)."
        ),
    ] = ALL_ROUTINGS,
    precision: Annotated[str, typer.Option(help="What KV is stored as, with commas between.")] = "planes:8",
    memory: Annotated[
        str, typer.Option(help="For KV, of each replica, with commas between.", metavar="sizes")
    ] = "64GB",
    store: Annotated[
        str, typer.Option(help="Of a store that all share, with commas between; 0: none.", metavar="sizes")
    ] = "0",
    summary_keys: Annotated[
        str, typer.Option(help="Most keys that a replica reports, with commas between; 0: all.")
    ] = "16384",
    report_s: Annotated[
        str, typer.Option(help="Seconds between two reports, with commas between; 0: every change at once.")
    ] = "5",
    prefill_rate: Annotated[float, typer.Option(min=1, help="Tokens that a replica computes in a second.")] = 20_000,
    decode_rate: Annotated[float, typer.Option(min=1, help="Tokens of each reply in a second.")] = 50,
    link_gbit: Annotated[float, typer.Option(min=0.001, help="Between a replica and the store, in a second.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Replies that a replica decodes at once.")] = 64,
    token_bytes: Annotated[int, typer.Option(min=1, help="Of a token at 16 bits (default: Qwen3-8B).")] = 147_456,
    made_up: Annotated[int, typer.Option(min=0, help="Also take so many made-up requests.")] = 0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG, SVG) here.", show_default="none")] = None,
    as_json: Json = False,
) -> None:
    """A trace over many replicas: hit rate, bytes moved and balance, by routing, memory, shared store and precision."""
    from kvstrata.bench import trace as traced
    from kvstrata.bench.fleet import Grid, measure, table
    from kvstrata.bench.fleet_run import Machine
    from kvstrata.codecs.registry import parse_for

    loaded = [traced.load_trace(path) for path in traces or []] + ([traced.made_up(made_up)] if made_up else [])
    if not loaded:
        raise typer.BadParameter("Give a TRACE or --made-up 10000")
    grid = Grid(
        numbers(replicas, 1),
        _routings(routing),
        [parse_for(name, 128).name for name in words(precision)],
        _sizes(memory),
        _sizes(store),
        [count or None for count in numbers(summary_keys, 0)],
        _seconds(report_s),
    )
    machine = Machine(prefill_rate, decode_rate, link_gbit * 1e9 / 8, batch)
    figures = measure(loaded, grid, machine, token_bytes=token_bytes, seed=seed, progress=say)
    if plot is not None:
        from kvstrata.bench.fleet_plot import plot_fleet

        plot_fleet(figures, plot)
    show(figures, table, as_json=as_json)


def _routings(text: str) -> list[RoutingName]:
    from kvstrata.bench.fleet_policies import ROUTINGS

    found: list[RoutingName] = [name for name in ROUTINGS if name in words(text)]
    if len(found) < len(set(words(text))):
        raise typer.BadParameter(f"'{text}' is not a list of {', '.join(ROUTINGS)}, with commas between")
    return found


def _sizes(text: str) -> list[int]:
    from kvstrata.sizes import Size

    sizes = [Size.parse(word) for word in words(text)]
    if any(size.num_bytes is None for size in sizes):
        raise typer.BadParameter(f"'{text}' has a share. Give sizes such as 64GB, with commas between")
    return [size.num_bytes or 0 for size in sizes]


def _seconds(text: str) -> list[float]:
    try:
        found = [float(word) for word in words(text)]
    except ValueError:
        found = []
    if not found or not all(0 <= each < float("inf") for each in found):
        raise typer.BadParameter(f"'{text}' is not a list of seconds from 0 on, with commas between")
    return found
