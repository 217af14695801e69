"""An attention layer of one sequence: the base of full and window layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Protocol

import mlx.core as mx
import numpy as np

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda import rows as cuda_rows
from kvstrata.attention.cuda.tables import SlotPlace
from kvstrata.attention.dispatch import Keys
from kvstrata.attention.segments import SegmentedKV
from kvstrata.kv.buffers import Piece


class Watched(Protocol):
    @property
    def version(self) -> Hashable: ...


class AttentionLayer(cuda_rows.CudaRow, cpu_step.CpuRow, ABC):
    def __init__(self, offset: int) -> None:
        self.offset: int = offset  # position of the next token
        self._launch_state = cuda_rows.LaunchState()
        self._step: cuda_rows.CudaStep | None = None

    @property
    @abstractmethod
    def has_runs(self) -> bool:
        """Whether the CPU kernels can read everything that the layer attends to."""

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
    def next_buffer(self) -> Piece | None:
        """Return the buffer that the next token goes to; None: a ring, which never ends."""

    @abstractmethod
    def watched(self) -> list[Watched]:
        """Return what a plan watches: while no version changes, the layer reads what it reads now, and new tokens."""

    @abstractmethod
    def append(self, k: mx.array, v: mx.array) -> None:
        """Write tokens [1, kv_heads, tokens, dim]."""

    def end_pass(self) -> list[mx.array]:
        """Return the arrays that have to be issued before the next pass."""
        step, self._step = self._step, None
        return step.launched if step else []

    # The interface that mlx-lm's models call.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]:
        if keys.shape[2] == 1 and cpu_step.fits(keys, values) and self.has_runs:
            step = cpu_step.CpuStep((self,), keys, values)
            return step, step
        if cuda_rows.takes_rows(keys, values):
            self._step = cuda_rows.CudaStep((self,), keys, values, self._launch_state)
            return self._step, self._step
        self.append(keys, values)
        return self.keys_and_values()

    def attend_next(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray | None:
        """Write the next token and attend, for code that computes in numpy, without MLX arrays. None: this machine or
        the segments do not allow it."""
        return cpu_step.attend_next((self,), q, k, v, scale) if cpu_step.available() and self.has_runs else None

    def keys_and_values(self) -> tuple[Keys, Keys]:
        parts = self._step or SegmentedKV((self.segments(),))
        return parts, parts

    @abstractmethod
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        """Return the mask of the next `N` tokens."""
