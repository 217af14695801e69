"""Precision plan: the codecs of each layer's K and V."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.registry import fit, parse
from kvstrata.codecs.rope import RopeRotation
from kvstrata.kv.layout import LayerSpec, Layout

CodecPair = tuple[Codec, Codec]  # for K and for V

RAW: CodecPair = (RawCodec(), RawCodec())


@dataclass(frozen=True)
class PrecisionPlan:
    """The codecs of K and V by flat layer. Layers without K and V have RAW, which has no effect."""

    k: Codec  # as configured, before it was fitted to a layer
    v: Codec
    pairs: tuple[CodecPair, ...]

    def token_bytes(self, layout: Layout) -> float:
        """Return the bytes that a token takes in memory, in the layers that keep every token."""
        total = 0.0
        for spec, (k, v) in zip(layout.flat(), self.pairs, strict=True):
            if spec.kind == "full":
                sides = ((k, spec.k_dim), (v, spec.v_dim))
                total += spec.kv_heads * sum(bits_of(codec, dim, spec.dtype) * dim for codec, dim in sides) / 8
        return total

    @property
    def is_raw(self) -> bool:
        return all(pair == RAW for pair in self.pairs)


def bits_of(codec: Codec, dim: int, dtype: mx.Dtype) -> float:
    """Return the bits of a value as allocated in memory. A raw value has the dtype that the model computes in."""
    return 8.0 * dtype.size if isinstance(codec, RawCodec) else codec.bits_per_value(dim)


def choose_codecs(
    *, quantization: bool = False, bits: int | None = None, k: str | None = None, v: str | None = None
) -> CodecPair:
    """Return the codecs of K and V that these settings give together. Raises ConfigError for an unknown precision."""
    general = f"planes:{bits}" if bits is not None else "planes:8" if quantization else "raw"
    return parse(k or general), parse(v or general)


def raw_plan(layout: Layout) -> PrecisionPlan:
    return PrecisionPlan(*RAW, (RAW,) * len(layout.flat()))


def make_plan(layout: Layout, k: Codec, v: Codec) -> PrecisionPlan:
    """Make a plan with these codecs, fitted to each layer. Raises ConfigError where a layer cannot use a codec."""
    return PrecisionPlan(k, v, tuple(_pair(spec, k, v) for spec in layout.flat()))


def _pair(spec: LayerSpec, k: Codec, v: Codec) -> CodecPair:
    if spec.kind not in ("full", "window", "chunked"):
        return RAW
    return _fit_codec(k, spec.k_dim, spec.k_rotation), _fit_codec(v, spec.v_dim, spec.v_rotation)


def _fit_codec(wanted: Codec, dim: int, rotation: RopeRotation | None) -> Codec:
    codec = fit(wanted, dim)
    return replace(codec, rotation=rotation) if isinstance(codec, PlanesCodec) else codec
