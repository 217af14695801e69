"""Sections of `kvstrata top` as lines that fit a width. Knows rich and the shapes of the server's responses; sends no
requests and does not know the number of rows.

Precisions differ in shade as well as in colour: more bits are darker, so that a terminal without colours shows them
too. Text from clients (ids, paths) may hold anything: its control characters never reach the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.cli.cache_tables import share, size, style_of
from kvstrata.cli.top_fit import cells_of, spark
from kvstrata.cli.top_hour import Answer, Hour, first_token_s, memory_bytes, tokens_per_s

if TYPE_CHECKING:
    from rich.text import Text

RUNNING, ON_DISK, SHARED, FREE = "running", "disk", "remote", "free"
SHADES = {"raw": "█", "8": "▓", "6": "▓", "5": "▒", "4": "▒", "3": "▒", "2": "░"}
OTHER_SHADES = {RUNNING: "▞", ON_DISK: "▁", SHARED: "▔", FREE: "·"}
OTHER_STYLES = {RUNNING: "white", ON_DISK: "magenta", SHARED: "blue", FREE: "dim"}
TIERS_TOLD = "▁ disk  ▔ shared store"
EVENT_STYLES = {"failed": "red", "evicted": "yellow", "dropped": "yellow", "refused": "yellow", "pressure": "yellow"}
LABEL_CELLS = 12  # label before a line of the last hour
SPARK_NOTE_CELLS = 31
# Columns of a request from left to right: where a column's text ends or begins.
TIME_CELLS, API_CELLS, NUMBER_CELLS, HIT_CELLS, SECONDS_CELLS, SPEED_CELLS = 8, 12, 8, 6, 8, 7
LEAST_WHY_CELLS = 16
ID_CHARS = 12  # of the id of a conversation without a name
PARTED_CHARS = 24  # of either text where prompts diverge


def plain(text: object) -> str:
    """Replace characters that are not printable, such as terminal control characters."""
    return "".join(character if character.isprintable() else "?" for character in str(text))


def fitted(text: object, cells: int) -> str:
    """Cut or pad a text to exactly `cells` cells of a terminal."""
    from rich.cells import cell_len, set_cell_size

    said = plain(text)
    return set_cell_size(said, cells) if cell_len(said) <= cells else set_cell_size(said, max(0, cells - 1)) + "…"


def line(*parts: str | tuple[str, str]) -> Text:
    """Join texts, each with an optional style, to a line."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        text.append(*((part,) if isinstance(part, str) else part))
    return text


def heading(props: Answer, url: str, trouble: str = "") -> list[Text]:
    state, name = props["state"], plain(props["model"]["name"])
    doing = f"{state['running']} running, {state['prefilling']} of them prefill; {state['waiting']} wait    "
    speed = f"decode {state['decode_tokens_s']:.1f} tokens/s, prefill {state['prefill_tokens_s']:.0f}"
    draining = ("  it is shutting down", "yellow") if props.get("draining") else ""
    second = line((plain(trouble), "red")) if trouble else line(doing, speed)
    return [line((name, "bold"), (f"  {plain(url)}", "dim"), draining), second]


def memory(usage: Answer, width: int) -> list[Text]:
    """Show the used part of the budget by precision, and cache hits."""
    budget = usage["budget_bytes"]
    held = {RUNNING: usage["running_bytes"], **usage["tiers"]["hot"]["by_precision"]}
    used = sum(held.values())
    said = f"  {size(used)} of {size(budget)} ({share(used, budget)})"
    # This line is the legend of all bars.
    names = [f"{shade_of(name)} {plain(name)} {size(nbytes)}" for name, nbytes in held.items() if nbytes]
    whose = "" if usage["under"] == "all" else "this key's: "
    facts = [whose + (", ".join(names) or "nothing held")]
    if usage["pinned_bytes"]:
        facts.append(f"pinned {size(usage['pinned_bytes'])}")
    if disk := usage["tiers"].get("disk"):
        facts.append(f"disk {size(disk['bytes'])}")
    counters, target = usage["counters"], usage["target"]
    queried, hit = counters.get("queried_tokens", 0), counters.get("hit_tokens", 0)
    found = f"cached {share(hit, queried)} of {queried:,} prompt tokens"
    stored = f"new KV is stored as K {plain(target['k'])}, V {plain(target['v'])}"
    drawn = bar(held, budget, max(10, width - len(said)), FREE)
    return [line(*drawn, said), line(("; ".join(facts), "dim")), line((f"{found}; {stored}", "dim"))]


def last_hour(hour: Hour, width: int) -> list[Text]:
    """Plot memory, time to first token and tokens/s over time."""
    cells = max(10, width - LABEL_CELLS - SPARK_NOTE_CELLS)
    minutes = round(hour.span_s / 60)
    lines = [_title("Last hour" if minutes == 60 else f"Last {minutes} min", width)]
    figures = (
        ("memory", memory_bytes, size, "green"),
        ("first token", first_token_s, lambda seconds: f"{seconds:.2f} s", "cyan"),
        ("tokens/s", tokens_per_s, lambda speed: f"{speed:.1f}", "yellow"),
    )
    for name, figure, worded, style in figures:
        series = hour.series(figure, cells)
        known = [value for slot in hour.slots.values() if (value := figure(slot)) is not None]
        note = f" {worded(known[-1])}, at most {worded(max(known))}" if known else " not known yet"
        lines.append(line(fitted(name, LABEL_CELLS), (spark(series), style), (note, "dim")))
    return lines


def conversations(answer: Answer, width: int) -> list[Text]:
    """List conversations, newest first, then abandoned branches. Bars are relative to the longest conversation.

    A shared prefix is drawn once: the bars of other conversations begin where they diverge from it.
    """
    rows = answer["conversations"]
    names = f"{'tokens':>9}{'memory':>11}{'used':>8}"
    lines = [_title(f"Conversations {'last ' * answer['has_more']}{len(rows):,}", width, TIERS_TOLD, names)]
    longest = max((row["tokens"] for row in rows), default=0) or 1
    id_cells = min(36, max(14, width // 4))
    cells = max(10, width - id_cells - 1 - len(names))
    for row in sorted(rows, key=lambda row: (row["left_behind"], -row["last_use"])):
        start = min(cells - 1, round(cells * row["starts_at"] / longest))
        # KV that no tier has any more is not drawn.
        end = row["starts_at"] + sum(part["tokens"] for part in row["parts"])
        own = max(1, round(cells * end / longest) - start)
        parts = [(part["k"] if part["tier"] == "hot" else part["tier"], part["tokens"]) for part in row["parts"]]
        held = sum(part["bytes"] for part in row["parts"] if part["tier"] == "hot")
        pinned = ("*", "bold") if row["pinned"] else " "
        figures = f"{row['tokens']:>9,}{size(held):>11}"
        drawn = (" " * start, *strata(parts, own), " " * (cells - start - own))
        lines.append(
            line(fitted(_name(row), id_cells), pinned, *drawn, figures, (f"{_ago(row['last_use']):>8}", "dim"))
        )
    return lines


def requests(hour: Hour, width: int) -> list[Text]:
    """List requests, newest first."""
    fixed = TIME_CELLS + API_CELLS + 2 * NUMBER_CELLS + HIT_CELLS + SECONDS_CELLS + SPEED_CELLS
    why_cells = max(LEAST_WHY_CELLS, width - fixed)
    names = (
        f"{'api':<{API_CELLS - 1}}{'prompt':>{NUMBER_CELLS}}{'cached':>{NUMBER_CELLS}}{'':>{HIT_CELLS}}"
        f"{'':2}{fitted('miss or error', why_cells - 2)}{'first':>{SECONDS_CELLS}}{'tok/s':>{SPEED_CELLS}}"
    )
    lines = [line(("Requests ", "bold"), (names, "dim"))]
    for request in reversed(hour.requests):
        prompt, cached = request["prompt_tokens"], request["cached_tokens"]
        first, speed = request["first_token_s"], request["tokens_per_s"]
        hits = "" if cached is None or not prompt else f"{100 * cached / prompt:.0f} %"
        failed = request["status"] >= 400 or request["error"]
        took = f"{'' if first is None else f'{first:.2f} s':>{SECONDS_CELLS}}"
        took += f"{'' if speed is None else f'{speed:.1f}':>{SPEED_CELLS}}"
        # An error may use the space of missing figures.
        cells = why_cells - 2 if took.strip() else why_cells - 2 + len(took)
        lines.append(
            line(
                (time.strftime("%H:%M:%S", time.localtime(request["time"])), "dim"),
                f" {fitted(_api(request['path']), API_CELLS - 1)}",
                f"{_number(prompt):>{NUMBER_CELLS}}{_number(cached):>{NUMBER_CELLS}}",
                (f"{hits:>{HIT_CELLS}}", "green" if cached else ""),
                (f"  {fitted(_why(request), cells)}", "red" if failed else ""),
                took if took.strip() else "",
            )
        )
    return lines


def running(sequences: Sequence[Answer], width: int) -> list[Text]:
    lines = [_title("Running", width)]
    longest = max((sequence["tokens"] for sequence in sequences), default=0)
    cells = max(10, width - 46)
    for sequence in sequences:
        own = min(cells, max(1, round(cells * sequence["tokens"] / max(1, longest))))
        drawn = strata([(part["k"], part["tokens"]) for part in sequence["parts"]], own)
        names = dict.fromkeys(part["k"] for part in sequence["parts"])
        shared = ", shared" if any(part["shared_by"] > 1 for part in sequence["parts"]) else ""
        said = f"{sequence['tokens']:>9,} {', '.join(map(plain, names))}{shared}"
        lines.append(line(fitted(sequence["id"], 16), " ", *drawn, " " * (cells - own), (said, "dim")))
    return lines


def events(hour: Hour, width: int) -> list[Text]:
    """List events, newest first."""
    lines = [_title("Events", width)]
    for event in reversed(hour.events):
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        lines.append(line((f"{clock} ", "dim"), (plain(event["text"]), EVENT_STYLES.get(event["kind"], ""))))
    return lines


def bar(parts: Mapping[str, float], whole: float, width: int, rest: str) -> list[tuple[str, str]]:
    """Draw parts of a whole. `rest` names the style of the remaining cells."""
    cells = cells_of(parts, whole, width)
    drawn = [(shade_of(name) * number, _style(name)) for name, number in cells.items()]
    return [*drawn, (OTHER_SHADES[rest] * (width - sum(cells.values())), OTHER_STYLES[rest])]


def strata(parts: Sequence[tuple[str, int]], width: int) -> list[tuple[str, str]]:
    """Draw runs of tokens in order in exactly `width` cells. Each run gets a cell while there are enough."""
    whole = sum(tokens for _, tokens in parts) or 1
    drawn: list[tuple[str, str]] = []
    passed, taken = 0, 0
    for left, (name, tokens) in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
        passed += tokens
        end = min(width, max(taken + 1, min(width - left, round(width * passed / whole))))
        drawn.append((shade_of(name) * (end - taken), _style(name)))
        taken = end
    return [*drawn, (" " * (width - taken), "")]


def shade_of(name: str) -> str:
    """Return the shade of a precision by its bits, whatever the codec. A list of precisions is shaded by its first."""
    first = name.partition("+")[0]
    return OTHER_SHADES.get(first) or SHADES.get(first if first == "raw" else first.partition(":")[2][:1], "█")


def _style(name: str) -> str:
    return OTHER_STYLES.get(name) or style_of(name)


def _title(name: str, width: int, note: str = "", columns: str = "") -> Text:
    """Make a title line. `columns` are column names at the right end."""
    said = f" {note}{columns}" if note and len(name) + len(note) + len(columns) + 3 <= width else columns
    return line((name, "bold"), (f" {'─' * max(0, width - len(name) - len(said) - 1)}{said}", "dim"))


def _number(value: Any) -> str:
    return "" if value is None else f"{value:,}"


def _api(path: str) -> str:
    """Return the part of a path that tells APIs apart: chat, completions, messages, responses."""
    return path.removeprefix("/v1/").partition("/")[0]


def _why(request: Answer) -> str:
    """Return why no more of the prompt was cached or, for a failed request, the error."""
    if request["status"] >= 400 or request["error"]:
        return f"{request['status']} {request['error'] or ''}".strip()
    miss, parted = request["miss"] or "", request["parted"]
    if parted is None or miss in ("", "complete"):
        return "" if miss == "complete" else miss
    where = " in a reply" if parted["where"] == "reply" else ""
    return (
        f"{miss} at {parted['at']:,}{where}: {parted['was'][:PARTED_CHARS]!r} became {parted['now'][:PARTED_CHARS]!r}"
    )


def _name(row: Answer) -> str:
    """Return a conversation's name: the client's own id if there is one."""
    return row["session"] or f"{row.get('replica', '')} {row['id'][:ID_CHARS]}".strip()


def _ago(since_s: float) -> str:
    seconds = max(0.0, time.time() - since_s)
    for number, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= number:
            return f"{seconds / number:.0f} {unit}"
    return f"{seconds:.0f} s"
