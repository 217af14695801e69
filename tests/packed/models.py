"""Tiny quantized models, and measures of models with packed layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from kvstrata.packed.block import FusedBlock
from kvstrata.packed.form import CpuForm
from tests.models.conftest import quantized_module

EXACT = CpuForm(packs=True, plain_bits=None, activations=32)
ROUNDED = CpuForm(packs=True, plain_bits=None, activations=16)


def quantized_model(architecture: str, *, bits: int = 4, **overrides: Any) -> Any:
    """Return a model of four layers, with the same weights at each call."""
    return quantized_module(architecture, bits=bits, **{"num_hidden_layers": 4, **overrides})


def logits(model: Any, num_tokens: int = 24, num_steps: int = 4) -> np.ndarray:
    """Return the logits of a prompt and of single tokens after it."""
    ids = [int(x) for x in np.random.default_rng(3).integers(1, 90, num_tokens + num_steps)]
    caches = make_prompt_cache(model)
    passes = [ids[:num_tokens], *([each] for each in ids[num_tokens:])]
    return np.concatenate([np.array(model(mx.array([some]), cache=caches)[0]) for some in passes])


def num_fused(model: nn.Module) -> int:
    return sum(isinstance(module, FusedBlock) for _, module in model.named_modules())


def held_bytes(model: nn.Module) -> int:
    arrays: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for array in {id(array): array for _, array in arrays}.values())
