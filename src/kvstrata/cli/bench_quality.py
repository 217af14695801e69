"""`kvstrata bench quality`: the loss of each precision in what a model says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.bench_options import Json, Model, numbers

if TYPE_CHECKING:
    from kvstrata.bench.passes import Text
    from kvstrata.bench.quality import Quality
    from kvstrata.bench.watch import Watch
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
    from kvstrata.text.tokenizer import encode_prompt

    return Text(path.stem, encode_prompt(loaded.tokenizer, path.read_text(encoding="utf-8")))


QUALITY_HEAD = (
    f"{'text':<18}{'mode':<9}{'context':>8}  {'K':<10}{'V':<10}{'bits':>6}{'KL mean':>10}{'median':>10}{'99.9 %':>10}"
    f"{'same top-1':>12}{'of a window':>13}{'perplexity':>12}"
)


def _quality_line(row: Quality) -> str:
    line = f"{row.text[:17]:<18}{row.mode:<9}{row.context:>8}  {row.k:<10}{row.v:<10}{row.bits_per_value:>6.2f}"
    line += f"{row.kl_mean:>10.5f}{row.kl_median:>10.5f}{row.kl_p999:>10.4f}"
    return line + f"{row.top1:>12.3f}{row.top1_min:>13.3f}{row.ppl:>12.2f}"
