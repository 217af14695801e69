"""`kvstrata bench quality` and `layers`: what precision does to what a model says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.bench_options import Json, Model

if TYPE_CHECKING:
    from kvstrata.bench.layers import LayerLoss
    from kvstrata.bench.passes import Text
    from kvstrata.bench.quality import Quality
    from kvstrata.models.loaded import LoadedModel

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
    from kvstrata.cli.bench_progress import watched
    from kvstrata.models.load import load

    asked = _asked(pairs, modes, context, windows)
    loaded = load(model)
    texts = [_read(loaded, path) for path in text or [SAMPLE]]
    protocol = replace(figure.full_protocol(loaded, texts) if full else figure.FIRST_LOOK, **asked)
    rows: list[Quality] = []
    with watched(protocol.num_passes(len(texts))) as watch:
        measured = figure.measure(loaded, texts, protocol, watch)
        if not as_json:
            print(QUALITY_HEAD, flush=True)
        for row in measured:
            rows.append(row)
            if not as_json:
                print(_quality_line(row), flush=True)
    if plot is not None:
        from kvstrata.bench.plots import plot_quality

        plot_quality(rows, plot)
    if as_json:
        typer.echo(json.dumps([row.as_json() for row in rows]))


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
        asked["contexts"] = _numbers(context, smallest=8)
    if windows is not None:
        asked["windows"] = windows
    return asked


def _numbers(words: str, smallest: int) -> tuple[int, ...]:
    parts = [part.strip() for part in words.split(",")]
    if not all(part.isdigit() and int(part) >= smallest for part in parts):
        raise typer.BadParameter(f"'{words}' is not a list of numbers from {smallest} on, with commas between")
    return tuple(int(part) for part in parts)


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
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What each layer's K and V lose alone at each precision of planes: KL to full precision, all else raw."""
    from kvstrata.bench import layers as figure
    from kvstrata.bench.passes import subject_of
    from kvstrata.cli.bench_progress import watched
    from kvstrata.models.load import load

    protocol = figure.LayersProtocol(context, windows, _bits(bits))
    loaded = load(model)
    subject = subject_of(loaded)
    losses: list[LayerLoss] = []
    with watched(protocol.num_passes(subject.layout)) as watch:
        measured = figure.measure(subject, _read(loaded, text or SAMPLE), protocol, watch)
        if not as_json:
            print(_layers_head(protocol.bits), flush=True)
        for loss in measured:
            losses.append(loss)
            if not as_json and len(losses) % (2 * len(protocol.bits)) == 0:
                print(_layers_line(losses[-2 * len(protocol.bits) :]), flush=True)
    if plot is not None:
        from kvstrata.bench.plots import plot_layers

        plot_layers(losses, plot)
    typer.echo(json.dumps([loss.as_json() for loss in losses]) if as_json else _layers_sums(losses))


def _bits(words: str) -> tuple[int, ...]:
    numbers = _numbers(words, smallest=2)
    if not set(numbers) <= {8, 4, 2}:
        raise typer.BadParameter(f"--bits '{words}': planes have 8, 4 or 2")
    return numbers


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
