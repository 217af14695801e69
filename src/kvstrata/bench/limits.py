"""What plain work takes on this machine: a copy of memory, and how many products a model asks for.

A yardstick rather than a bound: reading alone can be somewhat faster than a copy, and products of bytes faster than
those of float32 numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.bench.driver import MIB, seconds
from kvstrata.platform.device import usable_cores

COPY_BYTES = 256 * MIB  # more than caches hold
COPIES = 5
GPU_COPIES = 8  # in one evaluation: the wait for a single one would be most of its time
# Dense, with gated MLPs, and all of whose layers attend to everything.
KNOWN = ("llama", "mistral", "qwen2", "qwen3")


def copy_gb_s() -> float:
    """Read and written, by all cores or by the GPU."""
    copy = _copy_by_cores if mx.default_device() == mx.cpu else _copy_by_gpu
    return 2 * COPY_BYTES / copy() / 1e9


def _copy_by_gpu() -> float:
    x = mx.zeros((COPY_BYTES // 4,), mx.uint32)

    def copy() -> None:
        mx.eval([x | number for number in range(GPU_COPIES)])

    copy()
    return statistics.median(seconds(copy) for _ in range(COPIES)) / GPU_COPIES


def _copy_by_cores() -> float:
    """Into memory that is there: the system takes longer to find new pages than a core to fill them."""
    num_cores = usable_cores()
    pieces = np.array_split(np.ones(COPY_BYTES, np.uint8), num_cores)
    places = np.array_split(np.ones(COPY_BYTES, np.uint8), num_cores)
    with ThreadPoolExecutor(num_cores) as pool:
        return statistics.median(seconds(lambda: list(pool.map(np.copyto, places, pieces))) for _ in range(COPIES))


@dataclass(frozen=True)
class Products:
    """Multiplications for one token."""

    in_layers: int
    in_output: int  # which a prompt needs once


def products(config: Mapping[str, Any]) -> Products | None:
    """By a model's config. None: it is not one of those that this is known of."""
    if config.get("model_type") not in KNOWN:
        return None
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    return Products(layers * (attention + mlp), hidden * config["vocab_size"])
