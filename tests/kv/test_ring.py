"""Slots and masks of a ring, compared with loops over positions."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.kv.window_layer import Ring

RINGS = st.integers(2, 12).flatmap(lambda size: st.builds(Ring, st.just(size), st.integers(0, size - 1)))


@given(RINGS, st.integers(0, 40))
def test_held_slots_are_the_slots_of_held_positions_in_order(ring: Ring, num_tokens: int) -> None:
    positions = [*range(min(ring.keep, num_tokens)), *range(ring.oldest(num_tokens), num_tokens)]
    assert ring.held_slots(num_tokens).tolist() == [ring.slot(position) for position in positions]


@given(RINGS, st.integers(0, 40))
def test_held_positions_are_those_not_overwritten(ring: Ring, num_tokens: int) -> None:
    by_slot = {ring.slot(position): position for position in range(num_tokens)}
    held = [*range(min(ring.keep, num_tokens)), *range(ring.oldest(num_tokens), num_tokens)]
    assert held == sorted(by_slot.values())


@given(RINGS, st.integers(0, 40), st.integers(1, 12))
def test_narrow_mask_shows_the_newest_tokens_of_the_window(ring: Ring, offset: int, window: int) -> None:
    positions = {}
    for position in range(max(0, offset + 1 - ring.max_size), offset + 1):
        positions[ring.slot(position)] = position
    seen = [positions.get(slot, -1) > offset - window for slot in range(min(ring.max_size, offset + 1))]
    mask = ring.narrow_mask(offset, window)
    assert mask.dtype == mx.bool_
    assert np.array(mask).tolist() == seen
