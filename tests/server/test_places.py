"""How much may be imported at once."""

from __future__ import annotations

import pytest

from kvstrata.errors import QueueFull
from kvstrata.server.http.body_limit import ImportLimit


def test_files_imported_at_once_are_bounded_together() -> None:
    limit = ImportLimit()
    with limit.reserve(100) as first:
        first(60)
        with limit.reserve(100) as second:
            second(40)
            with pytest.raises(QueueFull, match="more than 100B together"):
                second(1)
        first(40)
    with limit.reserve(100) as alone:
        alone(100)


def test_limit_are_bounded_in_number() -> None:
    limit = ImportLimit(1)
    with limit.reserve(100), pytest.raises(QueueFull, match="1 files are being imported"), limit.reserve(100):
        pass
    with limit.reserve(100):
        pass
