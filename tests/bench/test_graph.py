"""Operations and bytes of a decode step as a Mac runs it."""

from __future__ import annotations

from kvstrata.bench.graph import measure


def test_a_step_has_the_same_operations_at_any_length_and_reads_its_own_tokens() -> None:
    short, long = measure((1024,)), measure((8192,))
    for a, b in zip(short, long, strict=True):
        assert a.case == b.case
        assert a.primitives == b.primitives, a.case
        assert b.nbytes < 8.2 * a.nbytes
    by_case = {row.case: row for row in long}
    # What is cut off is not read.
    assert by_case["cut of raw"].nbytes == by_case["raw"].nbytes
    assert by_case["cut of planes:4"].nbytes == by_case["planes:4"].nbytes
    assert by_case["raw"].ratio < 2.5
    assert by_case["planes:8"].ratio < 3
    assert by_case["planes:4"].ratio < 4
