"""What a user may set about weights on a CPU. Plain values: read before MLX is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.packed.form import Activations

CpuWeights = Literal["auto", "8", "4", "raw"]


@dataclass(frozen=True)
class CpuOptions:
    """Without effect on a GPU."""

    weights: CpuWeights = "auto"
    activations: Activations = 16


DEFAULT = CpuOptions()
