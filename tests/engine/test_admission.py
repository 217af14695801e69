"""Admission after memory was reclaimed: cases that a whole engine meets only by chance."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstrata.engine.admission import Admission
from kvstrata.prefix_cache.matching import NO_PREFIX
from tests.prefix_cache.kv import new_cache

PATIENCE_S = 5.0


@pytest.mark.parametrize(
    ("shrunk", "fits_then", "may_start", "waits_for_disk"),
    [
        ("done", False, True, False),
        ("steps_down", False, False, False),
        ("steps_down", True, True, False),
        ("awaits_disk", False, False, True),
        ("awaits_disk", True, True, False),
    ],
)
def test_request_starts_as_soon_as_it_nearly_fits(
    shrunk: str, fits_then: bool, may_start: bool, waits_for_disk: bool
) -> None:
    fits = iter([False, fits_then])
    cache = SimpleNamespace(
        reclaimer=SimpleNamespace(fits=lambda _: False, fits_for_now=lambda _: next(fits), shrink_to=lambda *_: shrunk),
        leases=SimpleNamespace(hold=tuple, release=lambda _: None),
        shortening=None,
        failures=new_cache().failures,
        disk=SimpleNamespace(patience_s=PATIENCE_S),
    )
    request: Any = SimpleNamespace(id=1)
    admission = Admission(
        cast("Any", cache),
        *cast("Any", (None, None, SimpleNamespace(cached_prefix=lambda _: NO_PREFIX), None)),
        max_running=1,
        max_batched_context=0,
        mixes=False,
        clock=lambda: 100.0,
    )
    assert admission.reclaim_for([request], [10], 1000, slice_s=0.1) == may_start
    assert admission.patience_left_s(request) == (PATIENCE_S if waits_for_disk else math.inf)
