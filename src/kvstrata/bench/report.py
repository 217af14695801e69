"""Report of `kvstrata bench compare`, made only from its JSON: Markdown and verdicts.

Values are medians over rounds. A missing figure is a dash, with the reason below the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstrata.bench.figures import MIB
from kvstrata.bench.plots import load_pyplot, save
from kvstrata.bench.scenarios import PromptLengths, Scenario, scenarios

OURS = "kvstrata"

Data = Mapping[str, Any]

KNOWN = {"reported": "its usage", "log": "its log", "time": "inferred from time"}
MUCH = 0.25  # share of the prompts: larger differences between reported and inferred tokens are pointed out
FEW_TOKENS = 64
AT_ONCE = (4, 7)  # scenarios


def markdown(data: Data, plots: Sequence[str] = ()) -> str:
    parts = [
        "# kvstrata beside its peers",
        _about(data),
        _sides(data),
        *(_plot(name) for name in plots),
        "## What the figures say",
        "\n".join(f"- {line}" for line in verdicts(data)) or "- There is no figure of kvstrata yet.",
        "## Scenario by scenario",
        *(_scenario(data, scenario) for scenario in titles() if _rows(data, scenario.number)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def titles() -> list[Scenario]:
    return scenarios(PromptLengths())


def _about(data: Data) -> str:
    about = data["about"]
    lengths = "full lengths" if about["share"] == 1 else f"{about['share']:g} of the full lengths"
    lines = [
        f"- when: {about['date']}",
        f"- machine: {about['machine']}",
        f"- model: {about['model']}, {lengths}, rounds: {about['rounds']}",
        f"- command: `{about['command']}`",
        *([f"- note: {about['note']}"] if about["note"] else []),
        *(["- note: the run was ended before all was measured"] if about["interrupted"] else []),
    ]
    return "\n".join(lines)


def _plot(name: str) -> str:
    """Return HTML with a light and a dark picture; GitHub shows the matching one."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg">'
        f'<img alt="{name}" src="{name}-light.svg"></picture>'
    )


def _sides(data: Data) -> str:
    rows = [["server", "version", "tokens computed are known by"]]
    for side in data["sides"]:
        how = f"{KNOWN[side['known_by']]}{': ' + side['known_note'] if side['known_note'] else ''}"
        rows.append([side["name"], side["version"] or f"skipped: {side['missing']}", "" if side["missing"] else how])
    commands = [f"- {side['name']}: `{side['command']}`" for side in data["sides"] if side["command"]]
    limited = [f"- {side['name']}: `{side['limited_command']}`" for side in data["sides"] if side["limited_command"]]
    said = ["", "How each was started:", "", *commands] if commands else []
    said += ["", "And with a limit, for scenario 6:", "", *limited] if limited else []
    return "\n".join([_table(rows, "---"), *said])


def _rows(data: Data, number: int, side: str | None = None) -> list[Data]:
    return [row for row in data["results"] if row["scenario"] == number and (side is None or row["side"] == side)]


def _scenario(data: Data, scenario: Scenario) -> str:
    heads = ["server", "prompt tokens", "computed", "share", "reported", "by time", "first token, ms", "largest"]
    special = {"pause": "longest pause, ms", "throughput": "reply tokens/s", "first token": ""}[scenario.metric]
    table = [[*heads, *([special] if special else []), "peak MiB", "held MiB"]]
    notes = []
    for side in data["sides"]:
        rows = _rows(data, scenario.number, side["name"])
        if not rows:
            continue
        table.append(_line(side["name"], rows, scenario))
        notes += sorted({f"- {side['name']}: {said}" for row in rows for said in _said(row)})
    return "\n".join([f"### {scenario.number}. {scenario.title}", "", _table(table), *(["", *notes] if notes else [])])


def _line(name: str, rows: Sequence[Data], scenario: Scenario) -> list[str]:
    first = [value for row in rows for value in row["first_token_s"]]
    cells = [
        name,
        _number(middle(rows, lambda row: row["prompt_tokens"] or None)),
        _number(middle(rows, prefilled)),
        _percent(middle(rows, share)),
        _number(middle(rows, lambda row: row["prefilled_reported"])),
        _number(middle(rows, lambda row: row["prefilled_inferred"])),
        _number(1000 * statistics.median(first) if first else None),
        _number(1000 * max(first) if first else None),
    ]
    if scenario.metric == "pause":
        cells.append(_number(middle(rows, lambda row: _times(row["slowest_gap_s"], 1000))))
    elif scenario.metric == "throughput":
        cells.append(_number(middle(rows, rate), 1))
    peak, held = (middle(rows, lambda row, key=key: _times(row[key], 1 / MIB)) for key in ("peak_bytes", "held_bytes"))
    return [*cells, _number(peak), _number(held, 1)]


def _said(row: Data) -> list[str]:
    said = [row["failure"]] if row["failure"] else []
    reported, inferred = row["prefilled_reported"], row["prefilled_inferred"]
    # Times say little about concurrent requests.
    if (
        row["scenario"] not in AT_ONCE
        and row["known_by"] == "reported"
        and reported is not None
        and inferred is not None
    ):
        over = inferred - reported
        if over > max(FEW_TOKENS, MUCH * row["prompt_tokens"]):
            said.append(f"it reports {reported} computed tokens, time says {inferred}")
    return [*said, *row["notes"]]


def prefilled(row: Data) -> int | None:
    return {
        "reported": row["prefilled_reported"],
        "log": row["prefilled_logged"],
        "time": row["prefilled_inferred"],
    }[row["known_by"]]


def share(row: Data) -> float | None:
    """Return the computed share of the prompts' tokens: one less the hit rate."""
    computed = prefilled(row)
    return None if computed is None or not row["prompt_tokens"] else computed / row["prompt_tokens"]


def rate(row: Data) -> float | None:
    return row["reply_tokens"] / row["took_s"] if row["took_s"] and row["answered"] == row["requests"] else None


def first_token(row: Data) -> float | None:
    return statistics.median(row["first_token_s"]) if row["first_token_s"] else None


def middle(rows: Sequence[Data], value: Callable[[Data], float | None]) -> float | None:
    """Return the median over rounds that have a value."""
    found = [each for row in rows if (each := value(row)) is not None]
    return statistics.median(found) if found else None


def whole(data: Data, number: int, side: str) -> list[Data]:
    """Return the rounds that did not fail."""
    return [row for row in _rows(data, number, side) if not row["failure"]]


def verdicts(data: Data) -> list[str]:
    """Return a line for each scenario that compares kvstrata with every peer, whether it is ahead or behind."""
    lines = []
    for scenario in titles():
        ours = whole(data, scenario.number, OURS)
        if not ours:
            continue
        peers = [side["name"] for side in data["sides"] if side["name"] != OURS and not side["as_it_comes"]]
        rivals = {name: rows for name in peers if (rows := whole(data, scenario.number, name))}
        said = [_verdict(scenario, ours, name, rows) for name, rows in rivals.items()]
        absent = [name for name in peers if name not in rivals and _rows(data, scenario.number, name)]
        said += [f"{name} gave no whole figure" for name in absent]
        lines.append(f"{scenario.number}. {scenario.title}: {'; '.join(said) or 'no peer to compare with'}")
    return lines


def _verdict(scenario: Scenario, ours: Sequence[Data], name: str, theirs: Sequence[Data]) -> str:
    if scenario.metric == "throughput":
        parts = [_beside("throughput", middle(ours, rate), middle(theirs, rate), larger_is_better=True)]
    elif scenario.metric == "pause":
        gap = (middle(rows, lambda row: row["slowest_gap_s"]) for rows in (ours, theirs))
        first = (middle(rows, first_token) for rows in (ours, theirs))
        parts = [_beside("longest pause", *gap), _beside("first token", *first)]
    else:
        tokens = (middle(rows, prefilled) for rows in (ours, theirs))
        first = (middle(rows, first_token) for rows in (ours, theirs))
        parts = [_beside("computed tokens", *tokens), _beside("first token", *first)]
    return f"{name}: {', '.join(parts)}"


def _beside(what: str, ours: float | None, theirs: float | None, *, larger_is_better: bool = False) -> str:
    if ours is None or theirs is None:
        return f"{what} not known"
    if not theirs:
        return f"{what} {_number(ours)} against 0" + ("" if ours == 0 else " (behind)")
    ratio = ours / theirs
    is_behind = ratio < 1 if larger_is_better else ratio > 1
    return f"{what} {ratio:.2f} x{' (behind)' if is_behind else ''}"


def _table(rows: Sequence[Sequence[str]], others: str = "---:") -> str:
    """Return a Markdown table. `others` is the alignment of all columns but the first."""
    head, *body = rows
    lines = [head, ["---", *[others] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


COLOURS = ("#0b6e4f", "#b5651d", "#4a5899", "#8a8a8a", "#a23b72", "#c9a227")
THEMES = {"light": ("#ffffff", "#1f2328"), "dark": ("#0d1117", "#e6edf3")}  # ground and ink
# Scenarios in which a cache can help.
CACHED = {1: "again", 2: "chat", 3: "alternating", 4: "at once", 5: "restart", 6: "crowded", 9: "agent"}


def plot_report(data: Data, folder: Path) -> list[str]:
    """Write the plots and return their names without theme and extension."""
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
