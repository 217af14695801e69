"""Addresses of arrays on a GPU, as arrays: a launch takes any number of attention segments in one argument.

The host never learns an address, and MLX does not know what is read through one. The plan of a step therefore holds the
arrays that its addresses point to until the launch has ended, and the results of `attention/cuda/join.py` depend on
these arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.kernels import ADDRESSES

# Places in a row of addresses: of raw keys and values; of planes, which end with the table of a RoPE rotation.
RAW_PLACES = (0, 5)

PLANES_PLACES = tuple(range(11))

COLLECTED = 16  # rows of addresses that one launch collects


def take(arrays: Sequence[mx.array], places: tuple[int, ...]) -> mx.array:
    """uint64 [12]: addresses of arrays without gaps."""
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
    """uint64 [length, 12]: the rows, then the last row repeated."""
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
