"""Sizes of chunks and buffers, as numbers."""

from __future__ import annotations

import pytest

from kvstrata.engine.scheduler import buffer_tokens, chunk_tokens


@pytest.mark.parametrize(
    ("tokens_s", "most", "expected"),
    [(0.0, 512, 128), (10.0, 512, 128), (511.0, 512, 128), (512.0, 512, 256), (800.0, 4096, 384), (1e6, 2048, 2048)],
)
def test_chunk_takes_about_half_a_second(tokens_s: float, most: int, expected: int) -> None:
    assert chunk_tokens(tokens_s, most) == expected


@pytest.mark.parametrize(
    ("capacity", "wanted", "expected"), [(0, 10, 10), (0, 5000, 2048), (8192, 5000, 2048), (20_000, 9000, 5000)]
)
def test_buffer_of_a_reply_grows_by_a_step_or_a_quarter(capacity: int, wanted: int, expected: int) -> None:
    assert buffer_tokens(capacity, wanted, 2048) == expected
