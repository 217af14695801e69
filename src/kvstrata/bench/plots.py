"""Plots of figures. Needs matplotlib, which no other module needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.bench.replay import POLICIES, ReplayRow
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.bench.quality import Quality

COLOURS = {"planes": "#0b6e4f", "affine": "#b5651d"}


def load_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'kvstrata[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    load_pyplot().close(figure)


def plot_quality(rows: Sequence[Quality], path: Path) -> None:
    """Plot bits against KL, a panel for each text, mode and context. Lower left is better."""
    pyplot = load_pyplot()
    panels = list(dict.fromkeys(_panel_of(row) for row in rows))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.2), squeeze=False, sharey=True)
    for axis, panel in zip(axes[0], panels, strict=True):
        _panel(axis, panel, [row for row in rows if _panel_of(row) == panel and row.k != "raw"])
    axes[0][0].set_ylabel("KL to full precision, mean (nats)")
    save(figure, path)


def _panel_of(row: Quality) -> str:
    return f"{row.text}, {row.mode}, context {row.context}"


def _panel(axis: Any, panel: str, rows: Sequence[Quality]) -> None:
    for row in rows:
        family = row.k.partition(":")[0]
        axis.scatter(row.bits_per_value, row.kl_mean, color=COLOURS.get(family, "black"), s=40, zorder=3)
        name = row.k if row.k == row.v else f"{row.k} / {row.v}"
        below = -11 if family == "planes" else 5  # keeps labels of neighbouring points of two families apart
        at = (row.bits_per_value, row.kl_mean)
        axis.annotate(name, at, textcoords="offset points", xytext=(6, below), fontsize=8)
    axis.set_yscale("log")
    axis.set_xlabel("bits per value, allocated")
    axis.set_title(panel)
    axis.margins(x=0.25, y=0.15)
    axis.grid(True, which="major", alpha=0.3)


POLICY_COLOURS = {"kvstrata": "#0b6e4f", "lru": "#b5651d", "optimal": "#888888"}


def plot_replay(rows: Sequence[ReplayRow], path: Path) -> None:
    pyplot = load_pyplot()
    traces = list(dict.fromkeys(row.trace for row in rows))
    bits = list(dict.fromkeys(row.bits for row in rows))
    size = (4.2 * len(bits), 3.6 * len(traces))
    figure, axes = pyplot.subplots(len(traces), len(bits), figsize=size, squeeze=False, sharey="row")
    for trace, line in zip(traces, axes, strict=True):
        for each, axis in zip(bits, line, strict=True):
            _replay_panel(axis, [row for row in rows if (row.trace, row.bits) == (trace, each)])
            axis.set_title(f"{trace}, {each} bits", fontsize=9)
        line[0].set_ylabel("hit rate")
    axes[0][0].legend(fontsize=8)
    save(figure, path)


def _replay_panel(axis, rows: Sequence[ReplayRow]) -> None:
    for policy in POLICIES:
        points = sorted((row.budget, row.hit_rate) for row in rows if row.policy == policy)
        style = "--" if policy == "optimal" else "-"
        shares, rates = [100 * share for share, _ in points], [rate for _, rate in points]
        axis.plot(shares, rates, style, marker="o", markersize=3, color=POLICY_COLOURS[policy], label=policy)
    axis.set_xscale("log")
    axis.set_ylim(0, 1)
    axis.set_xlabel("budget, % of all distinct blocks at 16 bits")
    axis.grid(True, alpha=0.3)
