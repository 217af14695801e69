"""Pictures of a comparison: computed tokens and time to the first token by scenario. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstrata.bench.plots import load_pyplot, save
from kvstrata.bench.report import Data, first_token, middle, share, whole

COLOURS = ("#0b6e4f", "#b5651d", "#4a5899", "#8a8a8a", "#a23b72", "#c9a227")
THEMES = {"light": ("#ffffff", "#1f2328"), "dark": ("#0d1117", "#e6edf3")}  # ground and ink
# Scenarios in which a cache can help.
CACHED = {1: "again", 2: "chat", 3: "alternating", 4: "at once", 5: "restart", 6: "crowded", 9: "agent"}


def plot_report(data: Data, folder: Path) -> list[str]:
    """The names of the pictures, without theme and ending."""
    shares = _bars(data, share)
    firsts = _bars(data, first_token)
    for theme in THEMES:
        _draw(shares, "share of prompt tokens computed", folder / f"computed-{theme}.svg", theme, log=False)
        _draw(firsts, "time to first token, s", folder / f"first-token-{theme}.svg", theme, log=True)
    return ["computed", "first-token"]


Bars = dict[str, list[float | None]]  # by side, a value for each scenario


def _bars(data: Data, value: Callable[[Data], float | None]) -> Bars:
    sides = [side["name"] for side in data["sides"] if not side["missing"] and not side["as_it_comes"]]
    return {side: [middle(whole(data, number, side), value) for number in CACHED] for side in sides}


def _draw(bars: Bars, label: str, path: Path, theme: str, *, log: bool) -> None:
    pyplot = load_pyplot()
    ground, ink = THEMES[theme]
    figure, axis = pyplot.subplots(figsize=(9, 3.8))
    figure.patch.set_facecolor(ground)
    axis.set_facecolor(ground)
    width = 0.8 / max(1, len(bars))
    for place, (side, values) in enumerate(bars.items()):
        _side(
            axis,
            [index + (place - (len(bars) - 1) / 2) * width for index in range(len(CACHED))],
            values,
            width,
            place,
            side,
        )
    if log and any(value for values in bars.values() for value in values):
        axis.set_yscale("log")
    axis.set_xticks(range(len(CACHED)), [f"{number} {name}" for number, name in CACHED.items()])
    axis.set_ylabel(label)
    axis.tick_params(colors=ink)
    axis.yaxis.label.set_color(ink)
    for spine in axis.spines.values():
        spine.set_color(ink)
    axis.grid(True, axis="y", alpha=0.25)
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncol": max(1, len(bars))}
    axis.legend(fontsize=8, facecolor=ground, edgecolor=ground, labelcolor=ink, **above)
    save(figure, path)


def _side(
    axis: Any, places: Sequence[float], values: Sequence[float | None], width: float, number: int, side: str
) -> None:
    shown = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
    colour = COLOURS[number % len(COLOURS)]
    axis.bar([place for place, _ in shown], [value for _, value in shown], width, color=colour, label=side)
