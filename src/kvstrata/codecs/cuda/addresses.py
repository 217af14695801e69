"""Where arrays lie on a GPU, as arrays that kernels read: so a launch takes any number of parts in one argument.

The host never learns an address, and MLX does not know what is read through one. So the plan of a step holds the arrays
that its addresses point to until the launch has ended, and what `cuda_joined` makes depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.kernels import ADDRESSES

# Places in a row of addresses: of keys and values that are raw; of planes, which end with the table of a turn.
RAW_PLACES = (0, 5)

PLANES_PLACES = tuple(range(11))

COLLECTED = 16  # rows of addresses that one launch puts together


class Whereabouts:
    """Of one part's arrays. Taken when first asked for, and again after `forget`."""

    def __init__(self) -> None:
        self._taken: mx.array | None = None
        self.version = 0

    def of(self, take: Callable[[], mx.array]) -> mx.array:
        if self._taken is None:
            self._taken = take()
        return self._taken

    def forget(self) -> None:
        """The arrays are written by MLX: whether in place is not known."""
        self._taken = None
        self.version += 1


def take(arrays: Sequence[mx.array], places: tuple[int, ...]) -> mx.array:
    """uint64 [12]: where arrays without gaps lie."""
    (out,) = cuda_kernels.addresses(places).run(
        (),
        inputs=list(arrays),
        output_shapes=[(ADDRESSES,)],
        output_dtypes=[mx.uint64],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    return out


def collect(rows: Sequence[mx.array], length: int) -> mx.array:
    """uint64 [length, 12]: those that are too many are the last one again."""
    padded = [*rows, *[rows[-1]] * (-len(rows) % COLLECTED)]
    groups = [padded[i : i + COLLECTED] for i in range(0, len(padded), COLLECTED)]
    lengths = [COLLECTED] * (len(groups) - 1)
    lengths.append(length - sum(lengths))
    tables = [
        cuda_kernels.collect(COLLECTED).run(
            (),
            inputs=group,
            output_shapes=[(size, ADDRESSES)],
            output_dtypes=[mx.uint64],
            grid=(ADDRESSES, size, 1),
            threadgroup=(ADDRESSES, 1, 1),
        )[0]
        for group, size in zip(groups, lengths, strict=True)
    ]
    return tables[0] if len(tables) == 1 else mx.concatenate(tables)
