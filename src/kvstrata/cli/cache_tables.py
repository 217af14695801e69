"""Tables of the server's cache responses, made with rich. Sends no requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstrata.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

Answer = Mapping[str, Any]
Table = Callable[[Answer], "RenderableType"]

size = partial(format_bytes, digits=1)

# Warm colours mark the precisions that take the most bytes.
STYLES = {"raw": "red", "8": "yellow", "6": "yellow", "5": "green", "4": "green", "3": "cyan", "2": "blue"}


def style_of(precision: str) -> str:
    """Return the style of a precision by its bits, whatever the codec. A list of precisions is styled by its first."""
    first = precision.partition("+")[0]
    return STYLES.get(first if first == "raw" else first.split(":")[1] if ":" in first else "", "white")


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def usage(answer: Answer) -> RenderableType:
    from rich.console import Group

    parts: list[RenderableType] = [tiers(answer), totals(answer)]
    if answer["sequences"]:
        parts.append(sequences(answer["sequences"]))
    return Group(*parts)


def tiers(answer: Answer) -> RichTable:
    title = "Cached" if answer["under"] == "all" else "Cached under this key"
    table = _table("tier", "precision", "bytes", "share", "tokens", "spans", title=title, right=2)
    for name, tier in answer["tiers"].items():
        table.add_row(name, "", size(tier["bytes"]), "", f"{tier['tokens']:,}", f"{tier['spans']:,}")
        for precision, nbytes in sorted(tier["by_precision"].items(), key=lambda pair: -pair[1]):
            table.add_row("", _coloured(precision), size(nbytes), share(nbytes, tier["bytes"]))
        for kind, nbytes in sorted(tier["by_kind"].items()):
            if len(tier["by_kind"]) > 1:
                table.add_row("", f"{kind} layers", size(nbytes), share(nbytes, tier["bytes"]))
    return table


def totals(answer: Answer) -> RichTable:
    table = plain_table()
    counters = answer["counters"]
    queried, hit = counters.get("queried_tokens", 0), counters.get("hit_tokens", 0)
    table.add_row("new KV is cached as", f"K {answer['target']['k']}, V {answer['target']['v']}")
    table.add_row("running sequences", size(answer["running_bytes"]))
    if answer["pinned_bytes"]:
        quota = answer["pin_quota_bytes"]
        table.add_row("pinned", size(answer["pinned_bytes"]) + (f" of {size(quota)}" if quota is not None else ""))
    table.add_row("budget", f"{size(answer['budget_bytes'])}, {size(answer['headroom_bytes'])} of it free")
    table.add_row("allocated by MLX", size(answer["allocator_bytes"]))
    table.add_row("cached prompt tokens", f"{hit:,} of {queried:,} tokens ({share(hit, queried)})")
    if answer.get("remote"):
        table.add_row("remote cache", remote_state(answer["remote"]))
    if counters.get("disk_allowed_bytes", 0) < counters.get("disk_limit_bytes", 0):
        allowed, limit = size(counters["disk_allowed_bytes"]), size(counters["disk_limit_bytes"])
        table.add_row("the disk's volume", f"has room for {allowed}, not for {limit}: free some, or use another folder")
    for name, value in counters.items():
        if name not in ("queried_tokens", "hit_tokens") and value:
            table.add_row(words(name), size(value) if name.endswith("_bytes") else f"{value:,}")
    return table


def remote_state(remote: Answer) -> str:
    """Describe whether the shared store is used, and the tokens read and written."""
    state = f"paused: {remote['paused_because']}" if remote["paused_because"] else "works"
    return f"{remote['url']} {state}, {remote['read_tokens']:,} tokens read, {remote['written_tokens']:,} written"


def words(counter: str) -> str:
    return counter.removesuffix("_bytes").replace("_", " ")


def sequences(running: Sequence[Answer], width: int = 40) -> RichTable:
    table = _table("request", "tokens", "bytes", "parts", title="Running", right=1, left_from=3)
    for sequence in running:
        nbytes = sum(part["bytes"] for part in sequence["parts"])
        table.add_row(sequence["id"], f"{sequence['tokens']:,}", size(nbytes), _bar(sequence, width))
    return table


def replicas(held: Mapping[str, Answer], states: Mapping[str, Answer]) -> RichTable:
    """Return a table of a fleet's replicas with their requests and cached KV."""
    table = _table("replica", "running", "waiting", "tokens", "memory", "disk", "hit rate", title="Replicas", right=1)
    for name, usage in held.items():
        state = states.get(name, {}).get("state", {})
        counters, disk = usage["counters"], usage["tiers"].get("disk")
        table.add_row(
            name,
            str(state.get("running", "-")),
            str(state.get("waiting", "-")),
            f"{usage['tiers']['hot']['tokens']:,}",
            size(usage["tiers"]["hot"]["bytes"]),
            size(disk["bytes"]) if disk else "-",
            share(counters.get("hit_tokens", 0), counters.get("queried_tokens", 0)),
        )
    return table


def explanation(answer: Answer) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    table = plain_table()
    cached, total = answer["cached_tokens"], answer["prompt_tokens"]
    table.add_row("cached", f"{cached:,} of {total:,} tokens ({share(cached, total)})")
    for tier, tokens in answer["by_tier"].items():
        table.add_row(f"  {tier}", f"{tokens:,}")
    table.add_row("ends at token", f"{answer['at_token']:,} ({answer['ends_because']})")
    table.add_row("", answer["meaning"])
    if answer["ends_because"] != "complete":
        before = Text("…" if answer["at_token"] > 0 else "").append(_one_line(answer["before"]), style="green")
        table.add_row("cached text ends with", before)
        table.add_row("the prompt continues", Text(_one_line(answer["after"]), style="yellow"))
    for place, each in enumerate(answer["instead"]):
        table.add_row("" if place else "the cache continues", Text(_one_line(each), style="cyan"))
    if (num_more := answer["num_instead"] - len(answer["instead"])) > 0:
        table.add_row("", f"and {num_more:,} other ways")
    if answer["session"]:
        found = answer["session"]
        table.add_row("session", f"{found['id']} (by {found['recognised_by']})")
        table.add_row("", divergence(found["divergence"]) or "It continues the session's last prompt.")
    return Group(table)


def sessions(answer: Answer) -> RenderableType:
    """List sessions in two lines each: the id has a line of its own and is never folded, so that it can be copied."""
    from rich.console import Group
    from rich.text import Text

    title = "Sessions" if answer["under"] == "all" else "Sessions of this key"
    lines = [Text(f"{title}: {answer['total']:,}", style="italic")]
    for each in answer["sessions"]:
        lines.append(Text(each["id"], style="bold", no_wrap=True, overflow="ignore"))
        requests = f"{each['requests']:,} request{'s' * (each['requests'] != 1)}"
        facts = (
            f"{requests}, {100 * each['hit_rate']:.1f} % cached, {each['tokens']:,} tokens",
            f"held: {_tiers_of(each)}",
            _precision_of(each),
            f"last use {_when(each['last_use'])}",
        )
        lines.append(Text(f"  {'; '.join(facts)}", style="dim"))
    return Group(*lines)


def session(answer: Answer) -> RenderableType:
    table = plain_table()
    table.add_row("session", f"{answer['id']} (by {answer['recognised_by']})")
    table.add_row("created", _when(answer["created"]))
    table.add_row("last use", _when(answer["last_use"]))
    hits = f"{answer['cached_tokens']:,} of {answer['prompt_tokens']:,} tokens ({100 * answer['hit_rate']:.1f} %)"
    table.add_row("requests", f"{answer['requests']:,}")
    table.add_row("cached prompt tokens", hits)
    table.add_row("conversation", f"{answer['tokens']:,} tokens; {_tiers_of(answer)}")
    table.add_row("precision", _precision_of(answer))
    table.add_row("pinned", "yes" if answer["pinned"] else "no")
    table.add_row("last divergence", divergence(answer["divergence"]) or "never")
    return table


def divergence(answer: Answer | None) -> str:
    """Return a sentence about where prompts diverged, or an empty string."""
    if answer is None:
        return ""
    whose = "the last prompt" if answer["where"] == "prompt" else "the last reply"
    was, now = _one_line(answer["was"]), _one_line(answer["now"])
    return f"Request {answer['request']:,} diverged from {whose} at token {answer['at']:,}: it was {was}, now {now}."


def _tiers_of(session: Answer) -> str:
    return ", ".join(f"{tier} {tokens:,}" for tier, tokens in session["held"].items())


def _precision_of(session: Answer) -> str:
    sides = ((side.upper(), session["precision"][side]) for side in ("k", "v"))
    return ", ".join(f"{side} {'+'.join(by_name)}" for side, by_name in sides if by_name) or "-"


def _when(seconds: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _one_line(text: str) -> str:
    """Quote a text, so that spaces at either end are visible."""
    return json.dumps(text, ensure_ascii=False)


def cleared(answer: Answer) -> RenderableType:
    return (
        f"Removed {answer['tokens']:,} tokens, {size(answer['bytes'])}. "
        f"{size(answer['bytes_left'])} stay: in use or pinned."
    )


def pinned(answer: Answer) -> RenderableType:
    return f"Pinned: the first {answer['tokens']:,} of {answer['prompt_tokens']:,} tokens, all that are cached."


def unpinned(answer: Answer) -> RenderableType:
    return f"Not pinned any more: the first {answer['tokens']:,} of {answer['prompt_tokens']:,} tokens."


def changed(answer: Answer) -> RenderableType:
    table = plain_table()
    table.add_row("dry run, nothing was changed" if answer["dry_run"] else "target", _target(answer["target"]))
    for name, tier in answer["tiers"].items():
        table.add_row(f"{name}, {tier['spans']:,} spans", _freed(tier))
    table.add_row("expected error of scores", f"{100 * answer['expected_error']:.2f} %")
    table.add_row("time", f"{answer['seconds']:.3f} s")
    if answer["note"]:
        table.add_row("", answer["note"])
    for left in answer["left_alone"]:
        things = f"{left['spans']:,} {'blocks' if left['tier'] == 'disk' else 'spans'}"
        table.add_row(f"not changed, {left['tier']}", f"{things}, {size(left['bytes'])}: {left['reason']}")
    return table


def _freed(tier: Answer) -> str:
    before, after, freed = tier["bytes_before"], tier["bytes_after"], tier["bytes_freed"]
    change = f"{size(before)} -> {size(after)}, "
    return change + (f"{size(-freed)} taken" if freed < 0 else f"{size(freed)} freed ({share(freed, before)})")


def progress(answer: Answer) -> RenderableType:
    state = "running" if answer["is_running"] else "not running"
    done, total = answer["spans_done"], answer["spans_total"]
    freed = size(answer["bytes_freed"])
    return f"{done:,} of {total:,} spans, {freed} freed, {state}, {answer['seconds']:.2f} s."


def _target(target: Answer) -> str:
    return f"K {target['k']}, V {target['v']}"


def _bar(sequence: Answer, width: int) -> RenderableType:
    from rich.text import Text

    bar = Text()
    total = max(1, sequence["tokens"])
    for part in sequence["parts"]:
        cells = round(width * part["tokens"] / total)
        bar.append("█" * cells, style=style_of(part["k"]))
    for part in sequence["parts"]:
        names = part["k"] if part["k"] == part["v"] else f"{part['k']}/{part['v']}"
        shared = f" shared by {part['shared_by']}" if part["shared_by"] > 1 else ""
        bar.append(f" {part['tokens']:,} ", style="dim").append(f"{names}{shared}", style=style_of(part["k"]))
    return bar


def _coloured(precision: str) -> RenderableType:
    from rich.text import Text

    return Text(precision, style=style_of(precision))


def _table(*columns: str, title: str, right: int, left_from: int | None = None) -> RichTable:
    """Make a table. Columns from `right` to before `left_from` are right-aligned numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        is_number = place >= right and (left_from is None or place < left_from)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    return table


def plain_table() -> RichTable:
    """Make a table of names and values without lines."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table
