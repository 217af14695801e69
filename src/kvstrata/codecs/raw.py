"""`raw`: the dtype that the model computes in, every bit kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvstrata.codecs.base import (
    FLOATS,
    Extent,
    Plane,
    Planes,
    UnsupportedCodec,
    check_input,
    check_queries,
    copy_rows,
    join_plain,
    own,
)
from kvstrata.codecs.products import exact_mix, exact_scores


@dataclass(frozen=True)
class RawCodec:
    @property
    def name(self) -> str:
        return "raw"

    def spec(self) -> dict[str, Any]:
        return {"codec": "raw", "version": 1}

    def check(self, dim: int) -> None:
        if dim < 1:
            raise UnsupportedCodec(f"raw stores vectors of at least one value, not {dim}.")

    def layout(self, extent: Extent) -> dict[str, Plane]:
        return {"values": Plane(extent.num_tokens, extent.dim, FLOATS)}

    def bits_per_value(self, dim: int) -> float:  # noqa: ARG002
        """Of a 16-bit checkpoint."""
        return 16.0

    def encode(self, x: mx.array, position: int = 0) -> Planes:
        """A copy: `x` is most often a range of a buffer that will go."""
        check_input(self, x, position)
        return own(self, {"values": copy_rows(x, 0, x.shape[-2])}, x, position)

    def adopt(self, values: mx.array, position: int = 0) -> Planes:
        """Takes the array as it is: no other code may write it, and it must be no slice of a larger one."""
        check_input(self, values, position)
        return own(self, {"values": values}, values, position)

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        return planes.arrays["values"].astype(dtype)

    def scores(self, q: mx.array, planes: Planes) -> mx.array:
        check_queries(q, planes, planes.dim)
        return exact_scores(q, planes.arrays["values"])

    def mix(self, p: mx.array, planes: Planes) -> mx.array:
        check_queries(p, planes, planes.num_tokens)
        return exact_mix(p.astype(mx.float32), planes.arrays["values"])

    def join(self, a: Planes, b: Planes) -> Planes:
        return join_plain(a, b)
