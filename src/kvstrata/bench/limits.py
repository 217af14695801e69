"""What the machine gives to plain work, and how much of it a model asks for: no step is faster than that."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.backend import usable_cores
from kvstrata.bench.driver import MIB, seconds

COPY_BYTES = 256 * MIB  # more than caches hold
COPIES = 5


def copy_gb_s() -> float:
    """Read and written, by all cores or by the GPU."""
    copy = _copy_by_cores if mx.default_device() == mx.cpu else _copy_by_gpu
    return 2 * COPY_BYTES / copy() / 1e9


def _copy_by_gpu() -> float:
    x = mx.zeros((COPY_BYTES // 4,), mx.uint32)
    mx.eval(x | 1)
    return statistics.median(seconds(lambda: mx.eval(x | 1)) for _ in range(COPIES))


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
    """Of a dense transformer with gated MLPs, by its config. None: it is something else."""
    try:
        hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
        kv_heads = config.get("num_key_value_heads") or heads
        dim = config.get("head_dim") or hidden // heads
        attention = hidden * dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * config["intermediate_size"]
        found = Products(layers * (attention + mlp), hidden * config["vocab_size"])
    except (KeyError, TypeError):
        return None
    has_experts = any("expert" in key and config[key] for key in config)
    return None if has_experts else found
