"""An attention layer of one sequence: what those that keep every token and those that keep a window have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Protocol

import mlx.core as mx
import numpy as np

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda import rows as cuda_rows
from kvstrata.attention.cuda.tables import Place
from kvstrata.attention.dispatch import Keys
from kvstrata.attention.segments import Parts
from kvstrata.kv.buffers import Piece


class Watched(Protocol):
    @property
    def version(self) -> Hashable: ...


class AttentionLayer(cuda_rows.Row, cpu_step.Row, ABC):
    def __init__(self, offset: int) -> None:
        self.offset: int = offset  # position of the next token
        self._counters = cuda_rows.Counters()
        self._step: cuda_rows.Step | None = None

    @property
    @abstractmethod
    def has_runs(self) -> bool:
        """Whether a CPU's kernels can read all that it attends to."""

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """What it writes to."""

    @abstractmethod
    def next_place(self) -> Place:
        """Where the next token goes in the buffer that it goes to."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """That it can ever hold; 0: no limit."""

    @abstractmethod
    def next_piece(self) -> Piece | None:
        """The buffer that it goes to, if that ends."""

    @abstractmethod
    def watched(self) -> list[Watched]:
        """While none of these has another version, it reads what it reads now, and the next token."""

    @abstractmethod
    def append(self, k: mx.array, v: mx.array) -> None:
        """Write tokens [1, kv_heads, tokens, dim]."""

    def end_pass(self) -> list[mx.array]:
        """What has to be issued before the next pass."""
        step, self._step = self._step, None
        return step.launched if step else []

    # What mlx-lm's models call.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]:
        if keys.shape[2] == 1 and cpu_step.fits(keys, values) and self.has_runs:
            step = cpu_step.Step((self,), keys, values)
            return step, step
        if cuda_rows.takes_rows(keys, values):
            self._step = cuda_rows.Step((self,), keys, values, self._counters)
            return self._step, self._step
        self.append(keys, values)
        return self.keys_and_values()

    def attend_next(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray | None:
        """The next token for code that computes in numpy: nothing changes hands with MLX. None: not on this machine,
        or not over what it reads."""
        return cpu_step.attend_next((self,), q, k, v, scale) if cpu_step.available() and self.has_runs else None

    def keys_and_values(self) -> tuple[Keys, Keys]:
        parts = self._step or Parts((self.parts(),))
        return parts, parts

    @abstractmethod
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        """For the next `N` tokens."""
