"""What the commands of `kvstrata bench` have in common: arguments, a model, how results are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvstrata.bench.driver import Figure

if TYPE_CHECKING:
    from kvstrata.models.load import LoadedModel

Figures = TypeVar("Figures", bound=Figure | Sequence[Figure])

Model = Annotated[
    str | None,
    typer.Argument(help="Folder, GGUF file or Hugging Face id of a model.", show_default="the default model"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often to measure; medians are shown.")]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Take a Qwen3-0.6B shape with random bf16 weights instead of MODEL.")
]


def chosen(model: str | None, *, random_weights: bool) -> LoadedModel:
    from kvstrata.bench.random_model import random_model
    from kvstrata.models.load import load

    return random_model() if random_weights else load(model)


def say(what: str) -> None:
    """On stderr: stdout is for results."""
    typer.echo(f"{what} ...", err=True)


def show(figures: Figures, table: Callable[[Figures], str], *, as_json: bool) -> None:
    if as_json:
        found = figures.as_json() if isinstance(figures, Figure) else [row.as_json() for row in figures]
        typer.echo(json.dumps(found))
    else:
        typer.echo(table(figures))


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def numbers(text: str, smallest: int, largest: int | None = None) -> tuple[int, ...]:
    parts = words(text)
    if not all(part.isdigit() and smallest <= int(part) <= (largest or int(part)) for part in parts):
        bounds = f"from {smallest} on" if largest is None else f"from {smallest} to {largest}"
        raise typer.BadParameter(f"'{text}' is not a list of numbers {bounds}, with commas between")
    return tuple(map(int, parts))
