"""Changes of cache counters between two samples, as events with a sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from kvstrata.sizes import format_bytes

_size = partial(format_bytes, digits=1, whole_from=100)  # as the dashboard formats sizes

# Counters that every request changes, and gauges: no events.
QUIET = re.compile(
    r"(?:queried|hit|stored)_(?:tokens|spans)|encoded_freed_bytes|refused_(?:present|empty)|(?:disk|remote)_(?:read|missed|queue|limit|leaving)_.*"
    r"|(?:disk|remote)_written_(?!bytes).*|remote_is_paused"
)
# The first pattern that matches a counter's name gives the kind and the sentence; {reason} is the pattern's group.
SENTENCES = (
    ("evicted", r"evicted_tokens", "{count} tokens were evicted to make room"),
    ("evicted", r"disk_evicted_(.+)", "{count} blocks on the disk were deleted: {reason}"),
    ("evicted", r"remote_evicted_(.+)", "{count} blocks of the shared store were deleted: {reason}"),
    ("pressure", r"stepped_down_spans", "{count} spans went to fewer bits to make room"),
    ("pressure", r"set_aside", "{count} requests gave up their memory and go on later"),
    ("dropped", r"dropped_tokens_(.+)", "{count} tokens were dropped and are on no disk: {reason}"),
    ("encoded", r"encoded_spans", "{count} spans were stored in fewer bits{reason}"),
    ("spilled", r"spilled_spans", "{count} spans were written to the disk to free memory"),
    ("spilled", r"disk_written_bytes", "{size} were written to the disk"),
    ("spilled", r"remote_written_bytes", "{size} were written to the shared store"),
    ("loaded", r"promoted_tokens", "{count} tokens came back from a lower tier"),
    ("loaded", r"restored_spans", "{count} spans got back the precision that was put away"),
    ("loaded", r"imported_tokens", "{count} tokens came with an imported session"),
    ("pinned", r"ttl_pins", "{count} prompts were pinned for some time"),
    ("refused", r"ttl_pins_over_quota", "{count} prompts were not pinned: the quota of their key is used up"),
    ("refused", r"restores_without_room", "{count} spans could not get their precision back: there is no room"),
    ("refused", r"refused_promotions", "{count} times memory had no room for what a lower tier has"),
    ("refused", r"refused_restores", "{count} times memory had no room for the precision that was put away"),
    ("refused", r"refused_spills", "{count} spans could not be written to the disk"),
    ("refused", r"(?:(?:disk|remote)_)?refused_(.+)", "{count} were refused: {reason}"),
    ("failed", r"unreadable_blocks", "{count} blocks on the disk could not be read and are computed again"),
    ("failed", r"(?:disk|remote)_quarantined_(.+)", "{count} damaged blocks were put aside: {reason}"),
    ("failed", r"disk_failed_(.+)", "the disk failed {count} times: {reason}"),
    ("failed", r"remote_failed_(.+)", "the shared store failed {count} times: {reason}"),
    ("failed", r"failed_(.+)", "work on {count} spans failed, which stay as they are: {reason}"),
)
ENCODED, FREED = "encoded_spans", "encoded_freed_bytes"
COMPILED = tuple((kind, re.compile(pattern), sentence) for kind, pattern, sentence in SENTENCES)


@dataclass(frozen=True)
class Happened:
    time_s: float  # since the epoch: time of the sample
    kind: str
    name: str  # of the counter; target: precision of new KV
    count: int
    text: str


def risen(before: Mapping[str, int], after: Mapping[str, int], time_s: float, *, grown: str = "") -> Iterator[Happened]:
    """Yield an event for each counter that has increased. `grown`: the precision whose bytes grew most, or empty."""
    freed_bytes = after.get(FREED, 0) - before.get(FREED, 0)
    for name, value in after.items():
        count = value - before.get(name, 0)
        if count > 0 and not QUIET.fullmatch(name):
            kind, text = _sentence(name, count, _encoded(grown, freed_bytes) if name == ENCODED else "")
            yield Happened(time_s, kind, name, count, text)


def most_grown(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return the precision whose bytes grew most, raw excluded, or an empty string."""
    gains = {name: nbytes - before.get(name, 0) for name, nbytes in after.items() if name != "raw"}
    name = max(gains, key=lambda each: gains[each], default="")
    return name if gains.get(name, 0) > 0 else ""


def retargeted(k: str, v: str, time_s: float) -> Happened:
    return Happened(time_s, "target", "target", 1, f"New KV is stored as K {k}, V {v}.")


def _encoded(grown: str, freed_bytes: int) -> str:
    to, freed = f", {grown}" if grown else "", f": {_size(freed_bytes)} freed" if freed_bytes > 0 else ""
    return to + freed


def _sentence(name: str, count: int, more: str = "") -> tuple[str, str]:
    for kind, pattern, sentence in COMPILED:
        if match := pattern.fullmatch(name):
            reason = match[1].replace("_", " ") if match.groups() else more
            text = sentence.format(count=f"{count:,}", size=_size(count), reason=reason)
            return kind, _numbered(text[0].upper() + text[1:], count)
    return "counted", f"{name.replace('_', ' ').capitalize()}: {count:,} more."


def _numbered(text: str, count: int) -> str:
    """Put the sentence into the singular for a count of 1."""
    if count != 1:
        return f"{text}."
    for many, one in ONE:
        text = re.sub(rf"\b{many}\b", one, text)
    return f"{text}."


ONE = (
    ("tokens were", "token was"), ("spans were", "span was"), ("blocks were", "block was"),
    ("prompts were", "prompt was"), ("blocks on the disk were", "block on the disk was"), ("1 were", "1 was"),
    ("blocks of the shared store were", "block of the shared store was"),
    ("tokens came", "token came"), ("spans went", "span went"), ("spans got", "span got"), ("times", "time"),
    ("requests gave up their memory and go", "request gave up its memory and goes"),
    ("and are on no disk", "and is on no disk"), ("and are computed", "and is computed"),
    ("spans could not be", "span could not be"),
    ("blocks on the disk could", "block on the disk could"), ("spans could not get their", "span could not get its"),
    ("spans failed, which stay as they are", "span failed, which stays as it is"), ("damaged blocks", "damaged block"),
    ("block were", "block was"),
)  # fmt: skip
