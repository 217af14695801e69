"""Says how far a long step has come: a bar on a terminal, one line otherwise. On stderr: stdout is for results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    return sys.stderr.isatty()


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how much more is done."""
    if not on_terminal():
        say(f"{title} ...")
        yield lambda _amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)
