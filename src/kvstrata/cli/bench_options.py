"""Arguments, progress and output that the `kvstrata bench` commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvstrata.bench.figures import Figure

if TYPE_CHECKING:
    from kvstrata.bench.load import Watch

Figures = TypeVar("Figures", bound=Figure | Sequence[Figure])

Model = Annotated[
    str | None,
    typer.Argument(help="Folder, GGUF file or Hugging Face id of a model.", show_default="the default model"),
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]


def say(what: str) -> None:
    """Print progress on stderr; stdout is for results."""
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


@contextmanager
def watched(num_passes: int) -> Iterator[Watch]:
    """Show a progress bar. Printed lines appear above it; output of typer.echo would be drawn into it."""
    from kvstrata.bench.load import Watch

    if not sys.stderr.isatty():
        yield Watch(on_step=lambda what: typer.echo(f"measuring {what} ...", err=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Redirect stdout only on a terminal: rows for a file or a pipe must not appear above the bar.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task("loading", total=num_passes)
        yield Watch(
            on_step=lambda what: progress.update(task, description=what),
            advanced=lambda: progress.advance(task),
        )
