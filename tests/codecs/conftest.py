from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_garbage() -> Iterator[None]:
    """What earlier tests left in cycles goes before, and not while memory is counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
