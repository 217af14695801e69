"""A decode step of all rows together by the portable kernel, if its trial chose it.

If planning a step fails for any reason, the rows attend one by one: slower, but correct.
"""

from __future__ import annotations

import logging
from functools import cache

import mlx.core as mx

from kvstrata.attention.metal import decode as metal_decode
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.attention.segments import RawSegment, SegmentedKV

logger = logging.getLogger(__name__)


def decode_together(q: mx.array, keys: SegmentedKV, scale: float, sinks: mx.array | None) -> mx.array | None:
    """Attend with q [rows, heads, 1, dim]. None: the portable kernel is not used."""
    dialect = metal_trials.dialect()
    if dialect is None or _is_one_buffer(keys):
        return None
    try:
        rows = [[part.read() for part in parts] for parts in keys.rows]
        if not metal_trials.is_used(q, rows):
            return None
        return _decode(q, rows, scale, sinks)
    except Exception as failure:  # noqa: BLE001
        # A step must not fail for the sake of speed.
        _complain(f"{type(failure).__name__}: {failure}")
        return None


def _decode(
    q: mx.array, rows: list[list[metal_decode.SegmentRead | None]], scale: float, sinks: mx.array | None
) -> mx.array | None:
    """Attend in halves if a step needs more launches than one launch can combine."""
    dialect = metal_trials.dialect()
    assert dialect is not None
    step = metal_decode.step_of(q, rows, scale, sinks, dialect)
    if step is not None:
        return metal_decode.attend(q, step, sinks, metal_trials.run())
    if len(rows) == 1:
        return None
    half = len(rows) // 2
    first, second = _decode(q[:half], rows[:half], scale, sinks), _decode(q[half:], rows[half:], scale, sinks)
    return None if first is None or second is None else mx.concatenate([first, second])


def _is_one_buffer(keys: SegmentedKV) -> bool:
    """Whether the only part is a raw buffer, which MLX attends to in one operation."""
    return len(keys.rows) == 1 and len(keys.rows[0]) == 1 and isinstance(keys.rows[0][0], RawSegment)


@cache
def _complain(what: str) -> None:
    """Warn once for each reason."""
    logger.warning("Batches attend by sequence, which is slower: a step could not be planned: %s", what)
