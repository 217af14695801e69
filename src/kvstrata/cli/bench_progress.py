"""How far a measurement has come: a bar on a terminal, plain lines otherwise. On stderr: stdout is for results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvstrata.bench.watch import Watch


@contextmanager
def watched(num_passes: int) -> Iterator[Watch]:
    """While the bar is shown, what is printed appears above it; typer.echo would write into it."""
    if not sys.stderr.isatty():
        yield Watch(told=lambda what: typer.echo(f"measuring {what} ...", err=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Rows that go to a file or a pipe must not be turned into lines above the bar.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task("loading", total=num_passes)
        yield Watch(
            told=lambda what: progress.update(task, description=what),
            advanced=lambda: progress.advance(task),
        )
