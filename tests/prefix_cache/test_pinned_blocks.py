"""Pinned blocks: a block stays on the disk exactly until its last pin ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.prefix_cache.tier_client import PinnedBlocks

KEYS = [bytes([number]) for number in range(5)]
PINS = st.integers(0, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), PINS),
        st.tuples(st.just("keep"), st.sets(PINS), st.sets(st.sampled_from(KEYS))),
        st.tuples(st.just("end"), st.sets(PINS)),
    ),
    max_size=30,
)


@given(STEPS)
def test_pinned_blocks_keys_are_those_of_all_open_pins(steps: list[tuple]) -> None:
    keys = set[bytes]()
    blocks, kept = PinnedBlocks(keys), dict[int, set[bytes]]()
    for step in steps:
        match step:
            case ("begin", pin):
                blocks.begin_pin(pin)
                kept.setdefault(pin, set())
            case ("keep", pins, new):
                blocks.pin_blocks(pins, new)
                for pin in pins & set(kept):
                    kept[pin] |= new
            case ("end", pins):
                blocks.end_pins(pins)
                for pin in pins:
                    kept.pop(pin, None)
        assert keys == set[bytes]().union(*kept.values())


def test_pinned_blocks_late_lookup_keeps_blocks_of_other_pins() -> None:
    keys = set[bytes]()
    blocks = PinnedBlocks(keys)
    blocks.begin_pin("first")
    blocks.begin_pin("second")
    blocks.pin_blocks(["second"], KEYS[2:3])  # written while both chains are looked up
    blocks.pin_blocks(["first"], KEYS[:2])
    assert keys == set(KEYS[:3])
    blocks.pin_blocks(["second"], KEYS[:1])
    blocks.end_pins(["first"])
    assert keys == {KEYS[0], KEYS[2]}
