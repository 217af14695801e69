"""What the commands of `kvstrata bench` have in common: arguments, a model, how results are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import typer

from kvstrata.bench.driver import Figure

Figures = TypeVar("Figures", bound=Figure | Sequence[Figure])

Model = Annotated[
    str | None,
    typer.Argument(help="Folder, GGUF file or Hugging Face id of a model.", show_default="the default model"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]


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
