"""Attention rows: an attention layer of several sequences that decode together."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from kvstrata.attention import dispatch
from kvstrata.attention.dispatch import Keys, LaunchState, PlannedReads, StepInput
from kvstrata.attention.segments import SegmentedKV
from kvstrata.kv.attention_layer import AttentionLayer
from kvstrata.kv.window_layer import WindowLayer


class AttentionRows:
    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = layers
        self.offset: mx.array | int = 0  # [rows], set for each step: RoPE takes one offset for each row
        self._step: StepInput | None = None
        self._launch_state = LaunchState()

    def begin_step(self, offsets: mx.array) -> None:
        self.offset = offsets
        self._step = None

    def end_step(self) -> list[mx.array]:
        """Return the arrays that have to be issued before the next step."""
        step, self._step = self._step, None  # holds segments that may be replaced before the next step
        return list(step.launched) if step is not None else []

    @property
    def layers(self) -> Sequence[AttentionLayer]:
        return self._layers

    def plan_reads(self) -> PlannedReads | None:
        return dispatch.plan_layer(self._layers, self._launch_state)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]:
        self._step = dispatch.begin_step(self._layers, keys, values, self._launch_state)
        if self._step is not None:
            return self._step, self._step
        num_rows = len(self._layers)
        for layer, k, v in zip(self._layers, mx.split(keys, num_rows), mx.split(values, num_rows), strict=True):
            layer.append(k, v)
        return self.keys_and_values()

    def attend_next(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray | None:
        """Write and attend for all rows, as `AttentionLayer.attend_next` does."""
        return dispatch.attend_next(self._layers, q, k, v, scale)

    def keys_and_values(self) -> tuple[Keys, Keys]:
        keys = self._step or SegmentedKV(tuple(layer.segments() for layer in self._layers))
        return keys, keys

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:  # noqa: N803, ARG002
        if N != 1:
            raise ValueError(f"a batch decodes one token at a time, not {N}")
        for layer in self._layers:
            if window_size is not None and not (isinstance(layer, WindowLayer) and layer.ring.max_size <= window_size):
                raise NotImplementedError("a window narrower than what the layer keeps needs a mask for each row")

    def arrays(self) -> list[mx.array]:
        return [array for layer in self._layers for array in layer.arrays()]

    def states(self) -> list[mx.array]:
        return []

    def release(self) -> list[mx.array]:
        return []
