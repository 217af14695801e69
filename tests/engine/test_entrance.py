"""Who is let in after room was made: cases that a whole loop meets only by chance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstrata.engine.admission import Entrance
from tests.prefix_cache.kv import new_stock


@pytest.mark.parametrize(
    ("shrunk", "fits_then", "is_let_in", "waits_for_disk"),
    [
        ("done", False, True, False),
        ("steps_down", False, False, False),
        ("steps_down", True, True, False),
        ("awaits_disk", False, False, True),
        ("awaits_disk", True, True, False),
    ],
)
def test_a_request_is_let_in_as_soon_as_it_nearly_fits(
    shrunk: str, fits_then: bool, is_let_in: bool, waits_for_disk: bool
) -> None:
    fits = iter([False, fits_then])
    room = SimpleNamespace(fits=lambda _: False, nearly_fits=lambda _: next(fits), shrink_to=lambda *_: shrunk)
    leases = SimpleNamespace(hold=tuple, release=lambda _: None)
    request = SimpleNamespace(stored=SimpleNamespace(found=None, awaits_room_s=None))
    failures = new_stock().failures
    entrance = Entrance(cast("Any", room), cast("Any", leases), failures, patience_s=5.0, clock=lambda: 100.0)
    assert entrance.let_in([cast("Any", request)], [10], 1000, slice_s=0.1) == is_let_in
    assert (request.stored.awaits_room_s == 100.0) == waits_for_disk
