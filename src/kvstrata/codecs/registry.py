"""Registry of codecs: maps names of precisions, and specs, to codecs.

    raw | affine:B[:gG] | planes:B      as in the settings; `affine:8` has groups of 64
    f16, bf16 = raw, q8_0 = planes:8, q4_0 = planes:4      llama.cpp's names

On a tier, `codec.spec()` and `encoded.where()` are JSON, and `encoded.arrays` the bytes; `encoded_from` restores planes
from them and refuses inconsistent input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from kvstrata.codecs.affine import DEFAULT_GROUP, AffineCodec
from kvstrata.codecs.base import Codec, EncodedArray, MismatchedArrays, UnsupportedCodec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.rope import RopeRotation, rotation_from

NAMES = "raw, affine:8 (or 6, 5, 4, 3, 2; :g32 or :g128), planes:8 (4, 2)"
LLAMA_CPP = {"f16": "raw", "bf16": "raw", "q8_0": "planes:8", "q4_0": "planes:4"}

_NAME = re.compile(r"(raw|affine|planes)(?::(\d+))?(?::g(\d+))?")
_FIELDS = {"raw": (), "affine": ("bits", "group"), "planes": ("bits",)}
_VERSIONS = {"raw": (1,), "affine": (1,), "planes": (1, 2)}


def parse(name: str) -> Codec:
    """Return the codec of a name in settings, before a model is known. `str(codec.name)` is the inverse."""
    family, bits, group = _parts(name)
    if family == "raw":
        return RawCodec()
    if family == "affine":
        return AffineCodec(bits, group or DEFAULT_GROUP)
    return PlanesCodec(bits)


def parse_for(name: str, head_dim: int) -> Codec:
    """Return the codec of a name, for vectors of this size. A group in the name is kept."""
    codec = parse(name)
    if _parts(name)[2] is None:
        return fit(codec, head_dim)
    codec.check(head_dim)
    return codec


def fit(codec: Codec, head_dim: int) -> Codec:
    """Return the codec for vectors of this size: groups of 64, the default of `affine`, become 32 where 64 does not
    divide the size."""
    if isinstance(codec, AffineCodec) and codec.group == DEFAULT_GROUP and head_dim % codec.group:
        codec = AffineCodec(codec.bits, 32)
    codec.check(head_dim)
    return codec


def from_spec(spec: Mapping[str, Any]) -> Codec:
    family, version = spec.get("codec"), spec.get("version")
    if not isinstance(family, str) or family not in _FIELDS:
        raise UnsupportedCodec(f"This version knows no codec {family!r}; it knows {', '.join(_FIELDS)}.")
    if version not in _VERSIONS[family]:
        known = " and ".join(map(str, _VERSIONS[family]))
        raise UnsupportedCodec(f"This version reads {family} of version {known}, not {version!r}.")
    fields = {name: spec.get(name) for name in _FIELDS[family]}
    for name, value in fields.items():
        if type(value) is not int:
            raise UnsupportedCodec(f"A spec of {family} needs {name!r} as a whole number, not {value!r}.")
    if (family, version) == ("planes", 2):
        return PlanesCodec(spec["bits"], _rotation_from(spec.get("turn")))
    types = {"raw": RawCodec, "affine": AffineCodec, "planes": PlanesCodec}
    return types[family](**fields)


def _rotation_from(spec: object) -> RopeRotation:
    try:
        return rotation_from(spec)
    except ValueError as error:
        raise UnsupportedCodec(f"Planes of version 2 cannot be read: {error}.") from error


def encoded_from(spec: Mapping[str, Any], where: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> EncodedArray:
    numbers = [where.get(name) for name in ("num_tokens", "position", "dim")]
    mean_runs = where.get("segments")
    if not isinstance(mean_runs, list) or any(
        type(number) is not int or number < 0 for number in [*numbers, *mean_runs]
    ):
        raise MismatchedArrays(f"Encoded arrays need num_tokens, position, dim and segments, not {dict(where)}.")
    codec = from_spec(spec)
    codec.check(where["dim"])
    return EncodedArray(codec, dict(arrays), where["num_tokens"], where["position"], where["dim"], tuple(mean_runs))


def _parts(name: str) -> tuple[str, int, int | None]:
    found = _NAME.fullmatch(LLAMA_CPP.get(name, name))
    if found is None and name.partition(":")[0] == "rotated":
        nearest = "planes:2" if name == "rotated:2" else "planes:4"
        raise UnsupportedCodec(f"{name!r}: there is no codec rotated any more. Use {nearest}, which loses less.")
    if found is None:
        raise UnsupportedCodec(f"Unknown precision {name!r}. Use one of: {NAMES}; or f16, bf16, q8_0, q4_0.")
    family, bits, group = found.groups()
    if (family == "raw") != (bits is None):
        raise UnsupportedCodec(
            f"{name!r}: {'raw has no bits' if bits else 'the bits are missing'}. Use one of: {NAMES}."
        )
    if group is not None and family != "affine":
        raise UnsupportedCodec(f"{name!r}: only affine has groups.")
    return family, int(bits or 0), int(group) if group else None
