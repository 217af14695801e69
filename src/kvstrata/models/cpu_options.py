"""Options of weights on a CPU. Plain values, apart from `placement`: settings are read before MLX is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.packed.form import Activations

CpuWeights = Literal["auto", "8", "4", "raw"]


@dataclass(frozen=True)
class CpuOptions:
    """Form of weights and of activations on a CPU. Without effect on a GPU."""

    weights: CpuWeights = "auto"
    activations: Activations = 16


DEFAULT = CpuOptions()
