"""What becomes of a model's weights on a CPU, as one value. Needs neither numba nor MLX to be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

# Bits of activations in a product; 32: as they are.
Activations = Literal[8, 16, 32]
# Of the arithmetic: a change of what is computed makes old KV another model's.
VERSION = 1


@dataclass(frozen=True)
class CpuForm:
    packs: bool  # weights that come quantized stay so; False: everything becomes float32
    plain_bits: int | None  # plain weights are quantized to so many bits; None: they become float32
    activations: Activations

    @property
    def identity(self) -> str:
        """Part of a model's: another form computes other KV. Empty for float32, as it always was."""
        return f"packed {VERSION}, plain {self.plain_bits}, activations {self.activations}" if self.packs else ""

    @property
    def words(self) -> str:
        """For people to read."""
        if not self.packs:
            return "float32"
        plain = "" if self.plain_bits is None else f", plain ones quantized to {self.plain_bits} bits"
        exact = "float32" if self.activations == 32 else f"{self.activations} bits"
        return f"packed{plain}; activations in products: {exact}"


DENSE = CpuForm(packs=False, plain_bits=None, activations=32)


@contextmanager
def exact_activations(model: Any) -> Iterator[None]:
    """Meanwhile products take activations as they are. For trials of what a model does: rounding would hide it."""
    modules = [module for _, module in model.named_modules() if isinstance(getattr(module, "activations", None), int)]
    before = [module.activations for module in modules]
    for module in modules:
        module.activations = 32
    try:
        yield
    finally:
        for module, activations in zip(modules, before, strict=True):
            module.activations = activations
