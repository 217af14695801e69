"""`kvstrata bench prefill-share`: what streams and a new prompt lose to each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.bench_options import Json, Model, RandomWeights, chosen

if TYPE_CHECKING:
    from kvstrata.bench.prefill_share import Sharing


def prefill_share(
    model: Model = None,
    shares: Annotated[
        str, typer.Option(help="Values of --prefill-share, with commas between.", metavar="shares")
    ] = "0.1,0.25,0.5,0.75,1",
    streams: Annotated[int, typer.Option(min=1, max=15, help="Streams that run when the prompt comes.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 3000,
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """A long prompt beside running streams: how much slower their tokens come, how much later its first one."""
    from kvstrata.backend import device
    from kvstrata.bench.prefill_share import measure

    rows = measure(
        chosen(model, random_weights=random_weights),
        memory_bytes=int(device().memory_bytes * 0.75),
        shares=_shares(shares),
        streams=streams,
        prompt_tokens=prompt_tokens,
        progress=lambda what: typer.echo(f"{what} ...", err=True),
    )
    typer.echo(json.dumps([row.as_json() for row in rows]) if as_json else _table(rows))


def _shares(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise typer.BadParameter("Give shares above 0 and up to 1, with commas between, as in 0.25,0.5,1.")
    return shares


def _table(rows: list[Sharing]) -> str:
    lines = [
        f"{'share':<7}{'gap alone':>11}{'p50':>8}{'p95':>8}{'ratio':>7}{'first alone':>13}{'beside':>9}{'ratio':>7}"
    ]
    for row in rows:
        gaps = f"{row.gap_alone_s * 1e3:>8.0f} ms{row.gap_p50_s * 1e3:>8.0f}{row.gap_p95_s * 1e3:>8.0f}"
        first = f"{row.first_alone_s:>11.2f} s{row.first_s:>9.2f}{row.first_ratio:>7.2f}"
        lines.append(f"{row.share:<7g}{gaps}{row.gap_ratio:>7.2f}{first}")
    return "\n".join([*lines, "gap: between two tokens of a stream, p95 to alone; first: the prompt's first token"])
