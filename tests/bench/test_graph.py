"""Operations and bytes of a decode step as a Mac runs it."""

from __future__ import annotations

from kvstrata.bench.graph import measure, measure_kernel


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


def test_a_batch_is_a_few_launches_of_the_kernel() -> None:
    """At any length: the parts are counted, not their tokens."""
    for tokens in (1024, 4096):
        by_case = {row.case: row for row in measure_kernel((tokens,))}
        assert by_case["raw, kernel"].primitives == 2
        assert by_case["planes:4, kernel"].primitives == 2
        assert by_case["8 rows, raw, kernel"].primitives <= 6
        assert by_case["8 rows, planes:8, kernel"].primitives <= 10
        assert by_case["8 rows, planes:4, kernel"].primitives <= 10
        for case in ("8 rows, raw, kernel", "8 rows, planes:8, kernel", "8 rows, planes:4, kernel"):
            assert 1 <= by_case[case].ratio < 1.5
