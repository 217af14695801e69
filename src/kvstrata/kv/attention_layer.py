"""An attention layer of one sequence: the base of full and window layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Protocol

import mlx.core as mx
import numpy as np

from kvstrata.attention import dispatch
from kvstrata.attention.dispatch import Keys, LaunchState, StepInput
from kvstrata.attention.segments import DecodeRow, SegmentedKV, SlotPlace
from kvstrata.kv.buffers import KvBuffer


class Versioned(Protocol):
    @property
    def version(self) -> Hashable: ...


class AttentionLayer(DecodeRow, ABC):
    def __init__(self, offset: int) -> None:
        self.offset: int = offset  # position of the next token
        self._launch_state = LaunchState()
        self._step: StepInput | None = None

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """Return the arrays that the layer writes to."""

    @abstractmethod
    def next_place(self) -> SlotPlace:
        """Return the place of the next token in its buffer."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Most tokens that the layer can ever hold; 0: no limit."""

    @abstractmethod
    def next_buffer(self) -> KvBuffer | None:
        """Return the buffer that the next token goes to; None: a ring, which never ends."""

    @abstractmethod
    def watched(self) -> list[Versioned]:
        """Return the objects whose versions invalidate a plan of this layer when they change."""

    @abstractmethod
    def append(self, k: mx.array, v: mx.array) -> None:
        """Write tokens [1, kv_heads, tokens, dim]."""

    def end_pass(self) -> list[mx.array]:
        """Return the arrays that have to be issued before the next pass."""
        step, self._step = self._step, None
        return list(step.launched) if step is not None else []

    # The interface that mlx-lm's models call.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]:
        self._step = dispatch.begin_step((self,), keys, values, self._launch_state) if keys.shape[2] == 1 else None
        if self._step is None:
            self.append(keys, values)
        return self.keys_and_values()

    def attend_next(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray | None:
        """Write the next token and attend, for code that computes in numpy, without MLX arrays. None: this machine or
        the segments do not allow it."""
        return dispatch.attend_next((self,), q, k, v, scale)

    def keys_and_values(self) -> tuple[Keys, Keys]:
        keys = self._step or SegmentedKV((self.segments(),))
        return keys, keys

    @abstractmethod
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        """Return the mask of the next `N` tokens."""
