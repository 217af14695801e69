"""Merged responses of several replicas. Pure functions over JSON and the Prometheus text format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Fields merged by their maximum: concurrent times, and estimates.
LARGEST = frozenset({
    "latency_s", "seconds", "expected_error", "next_before", "p50", "p95", "p99", "first_token_p50_s",
    "first_token_p95_s", "time", "slot_s",
})  # fmt: skip
MIXED = "mixed"


def summed(answers: Sequence[Any], name: str = "") -> Any:
    """Add numbers, concatenate lists and merge objects; strings that differ become `mixed`."""
    given = [answer for answer in answers if answer is not None]
    if not given:
        return None
    first = given[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for answer in given for key in answer)
        return {key: summed([answer.get(key) for answer in given], key) for key in keys}
    if isinstance(first, list):
        return [item for answer in given for item in answer]
    if isinstance(first, bool):
        return any(given)
    if isinstance(first, int | float):
        return max(given) if name in LARGEST else sum(given)
    return first if all(answer == first for answer in given) else MIXED


def histories(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge histories: slots of the same time are summed, requests and events name their replica.

    `now` is the earliest of all, so that the next request for newer entries misses none.
    """
    slots: dict[float, list[Any]] = {}
    for answer in answers.values():
        for slot in answer["slots"]:
            slots.setdefault(slot["time"], []).append(slot)
    requests, events = (
        sorted(
            ({**each, "replica": name} for name, answer in answers.items() for each in answer[what]),
            key=lambda each: each["time"],
        )
        for what in ("requests", "events")
    )
    first = next(iter(answers.values()))
    return {
        "under": first["under"],
        "now": min(answer["now"] for answer in answers.values()),
        "slot_s": first["slot_s"],
        "slots": [summed(same) for _, same in sorted(slots.items())],
        "requests": requests,
        "events": events,
    }


def labelled(texts: Mapping[str, str]) -> str:
    """Merge the metrics of all replicas and label each sample with its replica. The format requires each family once,
    with all its samples."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_with_label(line, replica))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "\n".join([*lines, ""])


def _with_label(line: str, replica: str) -> str:
    label = f'replica="{replica}"'
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}" if not rest.startswith("}") else f"{name}{{{label}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
