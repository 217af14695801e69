"""The common prefix, beside a loop over the items."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.common_prefix import common_prefix_len

ITEMS = st.lists(st.integers(0, 2), max_size=20)


def naive_len(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@given(start=ITEMS, a=ITEMS, b=ITEMS)
def test_common_prefix_len_equals_a_loop_for_each_type(start: list[int], a: list[int], b: list[int]) -> None:
    a, b = start + a, start + b
    expected = naive_len(a, b)
    assert common_prefix_len(tuple(a), tuple(b)) == expected
    assert common_prefix_len("".join(map(str, a)), "".join(map(str, b))) == expected
    assert common_prefix_len(np.array(a, np.int32), np.array(b, np.int32)) == expected


@pytest.mark.parametrize("at", [0, 1, 499_999, 999_999, 1_000_000])
def test_common_prefix_len_of_long_items(at: int) -> None:
    ids = np.zeros(1_000_000, np.int32)
    other = ids.copy()
    other[at:] = 1
    assert common_prefix_len(ids, other) == at
    assert common_prefix_len("a" * 1_000_000, "a" * at + "b" * (1_000_000 - at)) == at
    assert common_prefix_len(tuple(ids.tolist()), tuple(other.tolist())) == at
