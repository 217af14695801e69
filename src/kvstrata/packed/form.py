"""Form of a model's weights on a CPU. Imports neither numba nor MLX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

# Bits of activations in a product; 32: unrounded.
Activations = Literal[8, 16, 32]
# Version of the arithmetic. It changes with the results, so that KV of older versions is never a hit.
VERSION = 1


@dataclass(frozen=True)
class CpuForm:
    """Decision on the weights of a model, and the precision of activations in their products."""

    packs: bool  # quantized weights stay quantized; False: everything becomes float32
    plain_bits: int | None  # bits to which plain weights are quantized; None: they become float32
    activations: Activations

    @property
    def identity(self) -> str:
        """Part of a model's identity, because another form computes other KV. Empty for float32."""
        return f"packed {VERSION}, plain {self.plain_bits}, activations {self.activations}" if self.packs else ""

    @property
    def words(self) -> str:
        """Description for logs and the CLI."""
        if not self.packs:
            return "float32"
        plain = "" if self.plain_bits is None else f", plain ones quantized to {self.plain_bits} bits"
        exact = "float32" if self.activations == 32 else f"{self.activations} bits"
        return f"packed{plain}; activations in products: {exact}"


DENSE = CpuForm(packs=False, plain_bits=None, activations=32)


@contextmanager
def exact_activations(model: Any) -> Iterator[None]:
    """Let the products of a model take unrounded activations, for trials that compare outputs closely."""
    modules = [module for _, module in model.named_modules() if isinstance(getattr(module, "activations", None), int)]
    before = [module.activations for module in modules]
    for module in modules:
        module.activations = 32
    try:
        yield
    finally:
        for module, activations in zip(modules, before, strict=True):
            module.activations = activations
