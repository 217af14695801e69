"""What the writer tells whoever publishes its blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstrata.tiers.block import Block
from kvstrata.tiers.publish import Dropped, SettledIn
from kvstrata.tiers.reasons import Drop
from kvstrata.tiers.strides import Take
from kvstrata.tiers.usage import Counters
from kvstrata.tiers.writer import Writer
from tests.tiers.blocks import make_block, make_chain


def test_a_parent_stays_for_a_child_that_comes_while_another_block_is_written() -> None:
    parent, child = make_chain(2)
    has_begun, goes_on = threading.Event(), threading.Event()
    kept_for: list[frozenset[bytes]] = []

    def publish(_: Block, kept: Callable[[], frozenset[bytes]], __: Callable[[], bool], ___: Take) -> Dropped:
        has_begun.set()
        assert goes_on.wait(10)
        kept_for.append(kept())
        return Dropped(Drop.NO_ROOM)

    writer = Writer(
        publish,
        settle_in=SettledIn,
        counters=Counters(),
        on_written=lambda _: None,
        limit_bytes=1 << 30,
        first_pause_s=1,
    )
    assert writer.offer(make_block(9)) is None
    assert has_begun.wait(10)
    assert writer.offer(child) is None
    goes_on.set()
    assert writer.flush(10).is_empty
    assert parent.key in kept_for[0]
    assert writer.close(10)
