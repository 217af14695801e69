"""`kvstrata bench quality` and `layers`: what precision does to what a model says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.bench_options import Json, Model, numbers

if TYPE_CHECKING:
    from kvstrata.bench.layers import LayerLoss, LayersProtocol
    from kvstrata.bench.passes import Subject, Text
    from kvstrata.bench.quality import Protocol, Quality
    from kvstrata.bench.watch import Watch
    from kvstrata.kv.precision_plan import PrecisionPlan
    from kvstrata.models.load import LoadedModel

SAMPLE = Path(__file__).parents[1] / "bench" / "sample.txt"

Plot = Annotated[Path | None, typer.Option(help="Write a picture (PNG, SVG) here.", show_default="none")]


def quality(
    model: Model = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Text; give it again for more.", show_default="a short one"),
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(help="Precisions of K and V, such as planes:8/planes:4,planes:4/planes:4.")
    ] = None,
    modes: Annotated[str | None, typer.Option(help="Which of prefill, decode.", show_default="both")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of a window, with commas between.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Windows of each text.", show_default="2")] = None,
    full: Annotated[bool, typer.Option("--full", help="More windows, precisions and contexts; takes an hour.")] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What each precision does to what the model says: KL to full precision, same first choice, perplexity."""
    from kvstrata.bench import quality as figure
    from kvstrata.models.load import load

    asked = _asked(pairs, modes, context, windows)
    loaded = load(model)
    texts = [_read(loaded, path) for path in text or [SAMPLE]]
    protocol = replace(figure.full_protocol(loaded, texts) if full else figure.FIRST_LOOK, **asked)
    num_passes = protocol.num_passes(len(texts))
    rows = _shown(lambda watch: figure.measure(loaded, texts, protocol, watch), num_passes, as_json)
    if plot is not None:
        from kvstrata.bench.plots import plot_quality

        plot_quality(rows, plot)
    if as_json:
        typer.echo(json.dumps([row.as_json() for row in rows]))


def _shown(measure: Callable[[Watch], Iterator[Quality]], num_passes: int, as_json: bool) -> list[Quality]:
    """The rows, each printed as soon as it is done; not where JSON is asked for."""
    from kvstrata.cli.bench_progress import watched

    rows: list[Quality] = []
    with watched(num_passes) as watch:
        measured = measure(watch)
        if as_json:
            return list(measured)
        print(QUALITY_HEAD, flush=True)
        for row in measured:
            rows.append(row)
            print(_quality_line(row), flush=True)
    return rows


def _asked(pairs: str | None, modes: str | None, context: str | None, windows: int | None) -> dict[str, Any]:
    """The fields of a protocol that were given. Refuses bad ones before a model is loaded."""
    from kvstrata.bench.passes import MODES
    from kvstrata.bench.quality import parse_pairs

    asked: dict[str, Any] = {}
    if pairs is not None:
        asked["pairs"] = parse_pairs(pairs)
    if modes is not None:
        asked["modes"] = tuple(word.strip() for word in modes.split(","))
        if not set(asked["modes"]) <= set(MODES):
            raise typer.BadParameter(f"--modes '{modes}' is not of {', '.join(MODES)}")
    if context is not None:
        asked["contexts"] = numbers(context, smallest=8)
    if windows is not None:
        asked["windows"] = windows
    return asked


def _read(loaded: LoadedModel, path: Path) -> Text:
    from kvstrata.bench.passes import Text
    from kvstrata.text.tokens import encode_text

    return Text(path.stem, encode_text(loaded.tokenizer, path.read_text(encoding="utf-8")))


QUALITY_HEAD = (
    f"{'text':<18}{'mode':<9}{'context':>8}  {'K':<10}{'V':<10}{'bits':>6}{'KL mean':>10}{'median':>10}{'99.9 %':>10}"
    f"{'same top-1':>12}{'of a window':>13}{'perplexity':>12}"
)


def _quality_line(row: Quality) -> str:
    line = f"{row.text[:17]:<18}{row.mode:<9}{row.context:>8}  {row.k:<10}{row.v:<10}{row.bits_per_value:>6.2f}"
    line += f"{row.kl_mean:>10.5f}{row.kl_median:>10.5f}{row.kl_p999:>10.4f}"
    return line + f"{row.top1:>12.3f}{row.top1_min:>13.3f}{row.ppl:>12.2f}"


def layers(
    model: Model = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text to measure on.", show_default="a short one")
    ] = None,
    bits: Annotated[str, typer.Option(help="Precisions of planes, with commas between.")] = "8,4,2",
    context: Annotated[int, typer.Option(min=8, help="Tokens of a window.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="Windows of the text.")] = 1,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Compare plans on this text; give it again for more."),
    ] = None,
    pairs: Annotated[
        str, typer.Option(help="Plans with which those by layer are compared, at the same bytes.")
    ] = "planes:8/planes:4,planes:4,planes:4/planes:2",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What each layer's K and V lose alone at each precision of planes: KL to full precision, all else raw."""
    from kvstrata.bench import layers as figure
    from kvstrata.bench.passes import subject_of
    from kvstrata.bench.quality import Protocol, parse_pairs
    from kvstrata.models.load import load

    protocol = figure.LayersProtocol(context, windows, _bits(bits))
    compared = Protocol(parse_pairs(pairs), (context,), windows, ("prefill",))
    subject = subject_of(load(model))
    losses = _losses(subject, _read(subject.loaded, text or SAMPLE), protocol, as_json=as_json)
    if plot is not None:
        from kvstrata.bench.plots import plot_layers

        plot_layers(losses, plot)
    texts = [_read(subject.loaded, path) for path in held_out or []]
    rows = _compared(subject, texts, losses, compared, as_json=as_json) if texts else []
    if as_json:
        told = {"layers": [loss.as_json() for loss in losses], "held_out": [row.as_json() for row in rows]}
        typer.echo(json.dumps(told))


def _losses(subject: Subject, text: Text, protocol: LayersProtocol, *, as_json: bool) -> list[LayerLoss]:
    from kvstrata.bench.layers import measure
    from kvstrata.cli.bench_progress import watched

    losses: list[LayerLoss] = []
    with watched(protocol.num_passes(subject.layout)) as watch:
        measured = measure(subject, text, protocol, watch)
        if as_json:
            return list(measured)
        print(_layers_head(protocol.bits), flush=True)
        for loss in measured:
            losses.append(loss)
            if len(losses) % (2 * len(protocol.bits)) == 0:
                print(_layers_line(losses[-2 * len(protocol.bits) :]), flush=True)
    typer.echo(_layers_sums(losses))
    return losses


def _compared(
    subject: Subject, texts: Sequence[Text], losses: Sequence[LayerLoss], protocol: Protocol, *, as_json: bool
) -> list[Quality]:
    """Each plan, and after it the one by layer that takes the same bytes."""
    from kvstrata.bench.layers import bits_by_layer, plan_by_layer
    from kvstrata.bench.quality import measure_plans
    from kvstrata.codecs.registry import parse
    from kvstrata.kv.precision_plan import make_plan

    plans: dict[tuple[str, str], PrecisionPlan] = {}
    for pair in protocol.pairs:
        plans[pair] = make_plan(subject.layout, *map(parse, pair))
        by_layer = plan_by_layer(subject.layout, losses, plans[pair])
        plans["by layer,", "/".join(name.removeprefix("planes:") for name in pair)] = by_layer
        if not as_json:
            typer.echo(f"as {pair[0]} / {pair[1]}, K/V by layer: {bits_by_layer(by_layer)}")
    asked = replace(protocol, pairs=tuple(plans))
    return _shown(
        lambda watch: measure_plans(subject, texts, plans, asked, watch), asked.num_passes(len(texts)), as_json
    )


def _bits(words: str) -> tuple[int, ...]:
    bits = numbers(words, smallest=2)
    if not set(bits) <= {8, 4, 2}:
        raise typer.BadParameter(f"--bits '{words}': planes have 8, 4 or 2")
    return bits


def _layers_head(bits: Sequence[int]) -> str:
    return f"{'layer':<6}" + "".join(f"{f'{side} {each}':>12}" for side in "KV" for each in bits)


def _layers_line(losses: Sequence[LayerLoss]) -> str:
    """Of one layer, K before V."""
    return f"{losses[0].layer:<6}" + "".join(f"{loss.kl_mean:>12.6f}" for loss in losses)


def _layers_sums(losses: Sequence[LayerLoss]) -> str:
    """What all layers lose together, where their losses add up."""
    sums: dict[tuple[str, int], float] = {}
    for loss in losses:
        sums[loss.side, loss.bits] = sums.get((loss.side, loss.bits), 0.0) + loss.kl_mean
    return f"{'sum':<6}" + "".join(f"{total:>12.6f}" for total in sums.values())
