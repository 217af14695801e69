"""A picture of `bench replay`: hit rate by budget, a panel for each trace and precision. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstrata.bench.plots import load_pyplot, save
from kvstrata.bench.replay import POLICIES, Row

COLOURS = {"kvstrata": "#0b6e4f", "lru": "#b5651d", "optimal": "#888888"}


def plot_replay(rows: Sequence[Row], path: Path) -> None:
    pyplot = load_pyplot()
    traces = list(dict.fromkeys(row.trace for row in rows))
    bits = list(dict.fromkeys(row.bits for row in rows))
    size = (4.2 * len(bits), 3.6 * len(traces))
    figure, axes = pyplot.subplots(len(traces), len(bits), figsize=size, squeeze=False, sharey="row")
    for trace, line in zip(traces, axes, strict=True):
        for each, axis in zip(bits, line, strict=True):
            _panel(axis, [row for row in rows if (row.trace, row.bits) == (trace, each)])
            axis.set_title(f"{trace}, {each} bits", fontsize=9)
        line[0].set_ylabel("hit rate")
    axes[0][0].legend(fontsize=8)
    save(figure, path)


def _panel(axis, rows: Sequence[Row]) -> None:
    for policy in POLICIES:
        points = sorted((row.budget, row.hit_rate) for row in rows if row.policy == policy)
        style = "--" if policy == "optimal" else "-"
        shares, rates = [100 * share for share, _ in points], [rate for _, rate in points]
        axis.plot(shares, rates, style, marker="o", markersize=3, color=COLOURS[policy], label=policy)
    axis.set_xscale("log")
    axis.set_ylim(0, 1)
    axis.set_xlabel("budget, % of all distinct blocks at 16 bits")
    axis.grid(True, alpha=0.3)
