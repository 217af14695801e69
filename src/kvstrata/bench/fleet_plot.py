"""A picture of `bench fleet`: hit rate by the number of replicas, a panel for each trace. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstrata.bench.fleet import FleetFigures, Row, TraceFacts
from kvstrata.bench.fleet_policies import ROUTINGS, RoutingName
from kvstrata.bench.plots import load_pyplot, save

COLOURS: dict[RoutingName, str] = {
    "random": "#b5651d",
    "round-robin": "#c9a27e",
    "two": "#d4b106",
    "session": "#4a5899",
    "prefix": "#0b6e4f",
    "pooled": "#888888",
}


def plot_fleet(figures: FleetFigures, path: Path) -> None:
    """Of a larger grid, its first precision, sizes and reports."""
    pyplot = load_pyplot()
    count = len(figures.traces)
    # Text as text: the file is a third of the size, and can be searched.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fleet"}):
        figure, axes = pyplot.subplots(1, count, figsize=(4.2 * count, 3.8), squeeze=False, sharey=True)
        for trace, axis in zip(figures.traces, axes[0], strict=True):
            _panel(axis, trace, [row for row in figures.rows if row.trace == trace.trace])
        axes[0][0].set_ylabel("prompt tokens found")
        axes[0][-1].legend(fontsize=8)
        save(figure, path)


def _panel(axis: Any, trace: TraceFacts, rows: Sequence[Row]) -> None:
    first = _grid_place(rows[0])
    for routing in ROUTINGS:
        points = sorted((row.replicas, row.hit_rate) for row in rows if _is_at(row, routing, first))
        style = "--" if routing == "pooled" else "-"
        counts, rates = [count for count, _ in points], [rate for _, rate in points]
        if points:
            above = 3 if routing == "prefix" else 2  # it lies close to the pooled cache
            axis.plot(counts, rates, style, marker="o", ms=3, color=COLOURS[routing], label=routing, zorder=above)
    axis.axhline(trace.findable, color="#bbbbbb", linewidth=0.8)
    axis.set_xscale("log", base=2)
    ticks = sorted({row.replicas for row in rows})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_ylim(0, 1)
    axis.set_xlabel("replicas")
    axis.set_title(trace.trace, fontsize=9)
    axis.grid(True, alpha=0.3)


def _grid_place(row: Row) -> tuple[object, ...]:
    return row.precision, row.memory_bytes, row.remote_bytes, row.summary_keys, row.report_s


def _is_at(row: Row, routing: RoutingName, place: tuple[object, ...]) -> bool:
    return row.routing == routing and _grid_place(row) == place
