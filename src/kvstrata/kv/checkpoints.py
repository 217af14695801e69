"""Checkpoints: positions where a sequence can be resumed in a model that has more than full attention.

A window layer holds a ring, a chunked layer its newest chunk, a recurrent layer a state: none can step back. A
checkpoint is a copy of the state of all such layers at one position, which later tokens do not change. The block format
of tiers calls it a mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.chunked_layer import ChunkedLayer
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.recurrent_layer import RecurrentLayer
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.window_layer import WindowLayer


@dataclass(frozen=True)
class RecurrentState:
    arrays: tuple[mx.array | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not None)


# Window or chunked layer: its tokens, never overwritten ones first. Recurrent layer: its state. None: full attention.
LayerState = SealedSegment | RecurrentState | None


@dataclass(frozen=True)
class Checkpoint:
    """State of the window, chunked and recurrent layers at one position."""

    position: int
    states: tuple[LayerState, ...]  # by flat layer

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states if state is not None)


def needs_checkpoints(layout: Layout) -> bool:
    """Whether a sequence of this model can be resumed at checkpoints only."""
    return any(spec.kind in ("window", "chunked", "recurrent") for spec in layout.flat())


def take_checkpoint(cache: SequenceCache) -> Checkpoint:
    """Copy the state of a sequence at its present position."""
    return Checkpoint(cache.num_tokens, tuple(_state(layer, cache.num_tokens) for layer in cache.flat))


def reaches(checkpoint: Checkpoint, layout: Layout, num_tokens: int) -> bool:
    """Whether a sequence can resume after `num_tokens` with this checkpoint, which may be at a later position."""
    if num_tokens == checkpoint.position:
        return True
    if num_tokens > checkpoint.position:
        return False
    return all(_reaches_in(spec, checkpoint.position, num_tokens) for spec in layout.flat())


def _reaches_in(spec: LayerSpec, position: int, num_tokens: int) -> bool:
    if spec.kind == "window":
        # A ring that is not full yet holds every token so far.
        return position <= spec.max_size
    if spec.kind == "chunked":
        # The first token of a chunk attends to nothing before it; others need the chunk that the checkpoint holds.
        return num_tokens % spec.max_size == 0 or num_tokens // spec.max_size == (position - 1) // spec.max_size
    return spec.kind != "recurrent"


def states_at(layout: Layout, checkpoint: Checkpoint | None, num_tokens: int) -> tuple[Any, ...]:
    """Return the states from which layers resume after `num_tokens`, by flat layer; None for full attention."""
    specs = layout.flat()
    if checkpoint is None:
        if needs_checkpoints(layout):
            raise ValueError(f"this model has window or recurrent layers: a resume at {num_tokens} needs a checkpoint")
        return (None,) * len(specs)
    states = zip(checkpoint.states, specs, strict=True)
    return tuple(_resumable(state, num_tokens, spec.dtype) for state, spec in states)


def _state(layer: Any, position: int) -> LayerState:
    if isinstance(layer, RecurrentLayer):
        return RecurrentState(layer.copy_state())
    if isinstance(layer, WindowLayer | ChunkedLayer):
        k, v = layer.copy_state()
        start = position - k.shape[2]
        return SealedSegment(RawCodec().adopt(k.squeeze(0), start), RawCodec().adopt(v.squeeze(0), start))
    return None


def _resumable(state: LayerState, num_tokens: int, dtype: mx.Dtype) -> Any:
    if state is None:
        return None
    if isinstance(state, RecurrentState):
        return state.arrays
    k = state.k.codec.decode(state.k, dtype)[None]
    v = state.v.codec.decode(state.v, dtype)[None]
    return (k, v) if num_tokens >= state.num_tokens else (k[:, :, :num_tokens], v[:, :, :num_tokens])
