"""Grid keys: equal in every process, for any history of prompts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.prefix_cache.keys import Grid, GridKeys, grid_positions, uniform_grid, widening_grid

ROOT, OTHER_ROOT = bytes(32), bytes([1]) * 32


def test_widening_grid_has_few_positions_at_most_a_sixteenth_apart() -> None:
    positions = grid_positions(widening_grid, 128 * 1024)
    assert len(positions) == 144
    assert positions[:3] == [32, 64, 96]
    for before, after in pairwise(positions):
        assert after - before <= max(32, before // 16)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_grid_positions_of_longer_prompt_begin_with_those_of_shorter_one(first: int, second: int) -> None:
    short, long = sorted((first, second))
    assert grid_positions(widening_grid, long)[: len(grid_positions(widening_grid, short))] == grid_positions(
        widening_grid, short
    )


@pytest.mark.parametrize("grid", [uniform_grid(16), widening_grid])
@given(prompts=st.lists(st.tuples(st.booleans(), st.integers(0, 200), st.integers(0, 3)), min_size=1, max_size=50))
def test_grid_keys_do_not_depend_on_earlier_prompts(grid: Grid, prompts: list[tuple[bool, int, int]]) -> None:
    shared = GridKeys(grid)
    for is_other, length, seed in prompts:
        ids = np.random.default_rng(seed).integers(0, 3, 200).astype(np.int32)[:length]
        root = OTHER_ROOT if is_other else ROOT
        keys = shared.keys_for(root, ids)
        assert keys == GridKeys(grid).keys_for(root, ids)
        assert [position for position, _ in keys] == grid_positions(grid, length)


def test_grid_keys_differ_for_another_first_token_or_root() -> None:
    ids = np.arange(64, dtype=np.int32)
    changed = ids.copy()
    changed[0] = 7
    keys, other = GridKeys(uniform_grid(16)).keys_for(ROOT, ids), GridKeys(uniform_grid(16)).keys_for(ROOT, changed)
    assert not {key for _, key in keys} & {key for _, key in other}
    assert not {key for _, key in keys} & {key for _, key in GridKeys(uniform_grid(16)).keys_for(OTHER_ROOT, ids)}
