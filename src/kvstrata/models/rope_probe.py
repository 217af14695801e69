"""Probe of each layer's RoPE rotation: taken from the model's RoPE modules, and tried on the model.

A token alone attends to itself, so what a layer computes for it does not depend on its position, but for RoPE. The
same token is run at several positions, each time over empty caches that say where it is. A layer rotates like a
module if its key at each position is its key at position 0, rotated by the module. So it does not matter where a model
keeps its modules, which layers use them, or on which dims. Where nothing fits, keys are stored with plain means.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvstrata.codecs.rope import RopeRotation, make_rotation
from kvstrata.kv.layout import LayerSpec, Layout

log = logging.getLogger(__name__)

# Short ones show which dims turn, long ones how fast.
POSITIONS = (1, 7, 50, 255)
TOKEN = 3
# Of the length of a key. Another turn is off by about all of it; 16-bit keys are rounded.
_SAME = 1e-3
_SAME_ROUNDED = 0.02
# Of a unit vector that a module turns in float32.
_SAME_UNIT = 1e-3
_NOT_FOUND = "its keys turn like no RoPE module of the model"


def with_rotations(model: Any, layout: Layout) -> Layout:
    """Return the layout with the rotation of each layer."""
    if all(spec.kind in ("foreign", "recurrent") for spec in layout.flat()):
        return layout
    try:
        seen = [_keys_at(model, layout, position) for position in (0, *POSITIONS)]
    except Exception as error:  # noqa: BLE001
        # Whatever a model does with caches that it does not expect: plain means are right for every model.
        reason = f"the model cannot run a token alone: {type(error).__name__}: {error}"[:200]
        log.info("Keys are stored with plain means: %s", reason)
        return dataclasses.replace(layout, layers=tuple(_unknown(spec, reason) for spec in layout.layers))
    turns = list(dict.fromkeys(_turns_of(model)))
    found = iter([_found(spec, [keys[i] for keys in seen], turns) for i, spec in enumerate(layout.flat())])
    layers = []
    for layer in layout.layers:
        children = tuple(next(found) for _ in layer.children)
        layers.append(dataclasses.replace(layer, children=children) if children else next(found))
    return dataclasses.replace(layout, layers=tuple(layers))


class _Alone:
    """Empty cache that reports an offset. Keeps the token that it gets."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.start_position = 0
        self.held: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.held = keys, values
        self.offset += keys.shape[2]
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Return no mask: the token sees only itself."""

    def maybe_trim_front(self) -> None:
        """Do nothing: models with chunked caches call it."""


def _keys_at(model: Any, layout: Layout, position: int) -> list[tuple[mx.array, mx.array] | None]:
    """Return K and V that each flat layer caches for the token, in float32."""
    alone: list[Any] = []

    def cache_of(spec: LayerSpec, own: Any) -> Any:
        if spec.children:
            return tuple(map(cache_of, spec.children, own.caches))
        alone.append(_Alone(position) if spec.kind in ("full", "window", "chunked") else None)
        return alone[-1] or own

    caches = list(map(cache_of, layout.layers, make_prompt_cache(model)))
    model(mx.array([[TOKEN]]), cache=caches)
    held = [None if cache is None or cache.held is None else _in_float32(*cache.held) for cache in alone]
    mx.eval(held)
    return held


def _in_float32(k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
    return k[0, :, 0].astype(mx.float32), v[0, :, 0].astype(mx.float32)  # [heads, dim]


def _found(
    spec: LayerSpec, seen: Sequence[tuple[mx.array, mx.array] | None], turns: Sequence[RopeRotation]
) -> LayerSpec:
    if any(pair is None for pair in seen):
        has_keys = spec.kind in ("full", "window", "chunked")
        return _unknown(spec, "the model gave it no key") if has_keys else spec
    sides = [[np.asarray(pair[side]) for pair in seen if pair is not None] for side in (0, 1)]
    (k_turn, k_known), (v_turn, v_known) = (_turn_of(keys, spec.dtype, turns) for keys in sides)
    return dataclasses.replace(
        spec, k_rotation=k_turn, v_rotation=v_turn, rotation_reason="" if k_known and v_known else _NOT_FOUND
    )


def _turn_of(
    keys: Sequence[np.ndarray], dtype: mx.Dtype, turns: Sequence[RopeRotation]
) -> tuple[RopeRotation | None, bool]:
    """And whether that is known: None is right for keys that do not turn."""
    dim = keys[0].shape[-1]
    # A module may turn the first dims of a vector, or its last ones.
    placed = [each for turn in turns for each in (turn, dataclasses.replace(turn, first=dim - 2 * turn.num_pairs))]
    fitting = [turn for turn in placed if turn.first >= 0 and turn.end <= dim]
    best = min([None, *fitting], key=lambda turn: _misses(keys, turn))
    is_known = _misses(keys, best) <= (_SAME if dtype == mx.float32 else _SAME_ROUNDED)
    return (best if is_known else None), is_known


def _misses(keys: Sequence[np.ndarray], turn: RopeRotation | None) -> float:
    """How far the keys at POSITIONS are from the one at 0, turned; of its length."""
    first, *others = keys
    length = max(float(np.linalg.norm(first)), 1e-30)
    pairs = zip(POSITIONS, others, strict=True)
    return max(float(np.linalg.norm(key - turned(first, at, turn))) / length for at, key in pairs)


def turned(vectors: np.ndarray, position: int, turn: RopeRotation | None) -> np.ndarray:
    """[..., dim], from position 0 to another."""
    if turn is None:
        return vectors
    (angles,), (firsts, seconds) = turn.angles(np.array([position])), turn.pairs()
    out, a, b = vectors.copy(), vectors[..., firsts], vectors[..., seconds]
    out[..., firsts] = a * np.cos(angles) - b * np.sin(angles)
    out[..., seconds] = a * np.sin(angles) + b * np.cos(angles)
    return out


def _unknown(spec: LayerSpec, reason: str) -> LayerSpec:
    children = tuple(_unknown(child, reason) for child in spec.children)
    return dataclasses.replace(spec, rotation_reason=reason, children=children)


def _turns_of(model: Any) -> Iterator[RopeRotation]:
    """Return the rotations of RoPE modules that rotate unit vectors as their attributes say."""
    for module in model.modules():
        frequencies = _frequencies(module)
        if frequencies is None:
            continue
        said = getattr(module, "traditional", None)
        for is_interleaved in (False, True) if said is None else (bool(said),):
            turn = make_rotation(frequencies, is_interleaved=is_interleaved)
            if _turns_units(module, turn):
                yield turn


def _frequencies(module: Any) -> np.ndarray | None:
    """Return the frequencies of a RoPE module from its attributes; None for other modules."""
    periods, base = getattr(module, "_freqs", None), getattr(module, "base", None)
    if isinstance(periods, mx.array) and periods.ndim == 1:
        return 1.0 / np.asarray(periods.astype(mx.float32)).astype(np.float64)
    num_dims = getattr(module, "dims", None)
    if not isinstance(base, int | float) or type(num_dims) is not int or num_dims < 2:
        return None
    return getattr(module, "scale", 1.0) * float(base) ** (-np.arange(0, num_dims, 2) / num_dims)


def _turns_units(module: Any, turn: RopeRotation) -> bool:
    """Some modules make vectors longer, too (yarn): all by the same."""
    units = np.eye(2 * turn.num_pairs, dtype=np.float32)
    try:
        at_0, *others = [
            np.asarray(module(mx.array(units)[None, :, None], offset=at))[0, :, 0] for at in (0, *POSITIONS)
        ]
    except Exception:  # noqa: BLE001
        return False  # a module that is called in another way
    return all(
        np.abs(out - turned(at_0, at, turn)).max() <= _SAME_UNIT * np.abs(at_0).max()
        for at, out in zip(POSITIONS, others, strict=True)
    )
