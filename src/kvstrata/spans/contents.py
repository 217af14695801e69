"""What a block holds, told from its description and the sizes of its arrays: bytes by precision and by kind of layer.

No bytes of the arrays are needed, so a header is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvstrata.codecs.registry import from_spec
from kvstrata.errors import ConfigError

PRECISION, KIND = "precision ", "kind "
# Written by another version, which can tell.
UNKNOWN = "unknown"


def tally(description: Mapping[str, Any], tensor_bytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by label: `precision planes:8`, `kind full`. Each byte counts once as either."""
    found: Counter[str] = Counter()
    for name, nbytes in tensor_bytes.items():
        precision, kind = _labels(description, name)
        found[PRECISION + precision] += nbytes
        found[KIND + kind] += nbytes
    return dict(found)


def by_label(labels: Mapping[str, int], what: str) -> dict[str, int]:
    return {label.removeprefix(what): nbytes for label, nbytes in labels.items() if label.startswith(what) and nbytes}


def _labels(description: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Of one array, named as in spans/blocks.py."""
    try:
        place, side, *_ = name.split(".")
        if "groups" in description:
            return _precision(description["groups"][int(place)][side]), "full"
        state = description["states"][int(place)]
        return ("raw", "recurrent") if "recurrent" in state else (_precision(state[side]), "window")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return UNKNOWN, UNKNOWN


def _precision(described: Mapping[str, Any]) -> str:
    try:
        return from_spec(described["spec"]).name
    except ConfigError:
        return UNKNOWN
