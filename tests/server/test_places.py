"""How much may be imported at once."""

from __future__ import annotations

import pytest

from kvstrata.errors import QueueFull
from kvstrata.server.places import Places


def test_files_imported_at_once_are_bounded_together() -> None:
    places = Places()
    with places.take(100) as first:
        first(60)
        with places.take(100) as second:
            second(40)
            with pytest.raises(QueueFull, match="more than 100B together"):
                second(1)
        first(40)
    with places.take(100) as alone:
        alone(100)


def test_places_are_bounded_in_number() -> None:
    places = Places(1)
    with places.take(100), pytest.raises(QueueFull, match="1 files are being imported"), places.take(100):
        pass
    with places.take(100):
        pass
