"""A model that is ready to run, as one frozen value. Knows nothing of how it was found or loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.models.generation import SamplingDefaults

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class LoadedModel:
    name: str  # what /v1/models shows: the hub's id, or the folder's name
    path: Path  # the model folder
    module: nn.Module  # mlx-lm's model
    tokenizer: TokenizerWrapper
    config: dict[str, Any]  # config.json
    context_tokens: int
    vocab_size: int  # number of logits
    eos_ids: frozenset[int]
    weight_bytes: int  # allocated, after load
    dtype: str  # what the model computes in: "float32", "bfloat16"
    fingerprint: str  # blake3 over the content of weights, tokenizer, template, config and adapter, and over their form
    weights: str = ""  # the form that they are in, where it is not that of the files: for people to read
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # what its makers recommend
