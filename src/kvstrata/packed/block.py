"""Short form of a transformer block with packed weights: a few calls instead of some forty operations of MLX.

The short form is for blocks of the common build: norm, attention with RoPE, norm, gated MLP, each with a residual, and
optional norms behind both. A trial decides whether a block has this build: the block and its short form compute the
same tokens, and if the outputs differ, the block stays. A model of another build is therefore slower, not wrong.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from kvstrata.packed.cpu import block_kernels as cpu_block_kernels
from kvstrata.packed.cpu import rows as cpu_rows
from kvstrata.packed.form import Activations, exact_activations
from kvstrata.packed.layers import PackedLinear, flat
from kvstrata.packed.quantized import TILE_ROWS
from kvstrata.packed.weight import ActivationVectors, PackedWeight, join_weights

log = logging.getLogger(__name__)

# Largest difference as a share of the largest value, float32 on both sides.
TOLERANCE = 1e-4

ROUNDED = 1e-2  # where activations are rounded to 16 bits

TRIED_TOKENS = 5

MOST_WEIGHTS = 3  # that share an input: q, k and v

_HEADS = {"n_heads", "num_attention_heads"}

NOTHING = np.empty(0, np.float32)


class DistantCache:
    """A cache that stands far into a sequence and returns only the new tokens."""

    offset = 20_000

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class RopeTable:
    """RoPE rotation of queries and keys, from the model's own module, once for all layers with the same rotation."""

    def __init__(self, rope: Any, dim: int) -> None:
        self._rope = rope
        self._dim = dim
        num_turned = min(int(getattr(rope, "dims", dim)), dim)
        is_interleaved = bool(getattr(rope, "traditional", False))
        num_pairs = num_turned // 2
        # Layout of pairs of dims: their number, from a pair to the next, from the first dim to the second.
        self.pair_layout = (num_pairs, 2, 1) if is_interleaved else (num_pairs, 1, num_pairs)
        unit = np.zeros(dim, np.float32)
        unit[: num_pairs * self.pair_layout[1] : self.pair_layout[1]] = 1.0
        self._unit = mx.array(unit)
        # Place and table of the last pass.
        self._last: tuple[Any, np.ndarray] = (None, NOTHING)

    def rotation_at(self, offset: mx.array | int, num_rows: int, tokens: int) -> np.ndarray:
        """Rotate (1, 0) of each pair, at each token: float32 [rows * tokens, dim]."""
        # Offsets are compared by value: mlx-lm adds to its arrays of offsets in place.
        place = (offset if isinstance(offset, int) else np.asarray(offset).tobytes(), num_rows, tokens)
        if self._last[0] != place:
            units = mx.broadcast_to(self._unit, (num_rows, 1, tokens, self._dim))
            self._last = (place, flat(self._rope(units, offset=offset)))
        return self._last[1]

    def is_like(self, other: RopeTable) -> bool:
        if (self._dim, self.pair_layout) != (other._dim, other.pair_layout):
            return False
        return all(np.array_equal(self.rotation_at(at, 1, 2), other.rotation_at(at, 1, 2)) for at in (0, 1000))


class FusedLinear:
    """Products of weights that share an input, side by side."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        weights = [layer.weight for layer in layers]
        whole = join_weights(weights)
        self.weights: list[PackedWeight] = weights if whole is None else [whole]
        self.num_columns = sum(weight.shape[0] for weight in weights)
        self._whole_bias = _join_bias(layers)
        self.bias = NOTHING if self._whole_bias is None else np.asarray(self._whole_bias)
        # Always the same number of weights: numba compiles the kernels anew for each number.
        empty = PackedWeight(mx.zeros(0, mx.uint8), mx.zeros(0, mx.uint8), weights[0].form, 0)
        padding = [empty] * (MOST_WEIGHTS - len(self.weights))
        self.fields = tuple(weight.fields for weight in (*self.weights, *padding))

    @property
    def arrays(self) -> list[mx.array]:
        weights = [array for weight in self.weights for array in weight.arrays]
        return weights if self._whole_bias is None else [*weights, self._whole_bias]

    def with_bias(self, x: np.ndarray, activations: Activations) -> np.ndarray:
        made = self.without_bias(x, activations)
        if len(self.bias):
            made += self.bias
        return made

    def without_bias(self, x: np.ndarray, activations: Activations) -> np.ndarray:
        vectors = ActivationVectors(x, activations)
        made, first = np.empty((len(x), self.num_columns), np.float32), 0
        for weight in self.weights:
            weight.multiply(vectors, made, first)
            first += weight.shape[0]
        return made


def _join_bias(layers: Sequence[PackedLinear]) -> mx.array | None:
    """Concatenate the biases, zeros for a layer without a bias; None if no layer has one."""
    if not any("bias" in layer for layer in layers):
        return None
    parts = [layer.bias if "bias" in layer else mx.zeros(layer.weight.shape[0]) for layer in layers]
    whole = mx.concatenate(parts)
    mx.eval(whole)
    return whole


class RmsNorm:
    """RMS norm over the last axis. The weights are found by applying the model's own module to a vector of ones.
    Without a module the norm does nothing."""

    def __init__(self, module: Any = None) -> None:
        self.weight, self.eps = NOTHING, np.float32(0)
        if module is not None:
            self.eps = np.float32(module.eps)
            dim = module.weight.shape[0]
            self.weight = flat(module(mx.ones((1, dim))))[0] * np.sqrt(np.float32(1) + self.eps)
        self.fields = (self.weight, self.eps)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if not len(self.weight):
            return x
        made = np.empty_like(x)
        (cpu_rows.norm if len(x) < cpu_rows.PARALLEL_ROWS else cpu_rows.norm_parallel)(x, self.weight, self.eps, made)
        return made


class FusedBlock(nn.Module):
    """Short form of a block. Its arrays are parameters, as the arrays of the layers that it replaces were."""

    def __init__(self, block: Any, turning: RopeTable, activation: int) -> None:
        super().__init__()
        attention, mlp = block.self_attn, block.mlp
        self._turning = turning
        self.activation = activation
        self._activation = np.int64(activation)
        self._scale = attention.scale
        self._qkv = FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out, self._down = FusedLinear([attention.o_proj]), FusedLinear([mlp.down_proj])
        self._gate_up = FusedLinear([mlp.gate_proj, mlp.up_proj])
        self._before = RmsNorm(block.input_layernorm)
        has_both = "pre_feedforward_layernorm" in block
        self._between = RmsNorm(block.pre_feedforward_layernorm if has_both else block.post_attention_layernorm)
        self._behind_attention = RmsNorm(block.post_attention_layernorm if has_both else None)
        self._behind_mlp = RmsNorm(block.post_feedforward_layernorm if has_both else None)
        q_norm, k_norm = (RmsNorm(attention.get(name)) for name in ("q_norm", "k_norm"))
        self._head_norms = ((q_norm.weight, k_norm.weight), q_norm.eps)
        self._dim = attention.q_proj.weight.shape[0] // _num_heads(attention)
        num_kv_heads = attention.k_proj.weight.shape[0] // self._dim
        self._num_heads = (_num_heads(attention), num_kv_heads, num_kv_heads)
        self.activations: Activations = 32
        self.arrays = [array for fan in (self._qkv, self._out, self._gate_up, self._down) for array in fan.arrays]
        self.freeze()

    def run(self, x: mx.array, mask: Any, cache: Any, attend: Any) -> mx.array:
        h = flat(x)
        made = tuple(np.empty((x.shape[0], num, x.shape[1], self._dim), np.float32) for num in self._num_heads)
        turn = (self._turning.rotation_at(cache.offset, x.shape[0], x.shape[1]), *self._turning.pair_layout)
        if self._is_small(h):
            fields = (self._before.fields, self._qkv.fields, self._qkv.bias, self.activations)
            cpu_block_kernels.project(h, *fields, *self._head_norms, turn, made)
        else:
            projected = self._qkv.without_bias(self._before(h), self.activations)
            heads = cpu_rows.heads if len(h) < cpu_rows.PARALLEL_ROWS else cpu_rows.heads_parallel
            heads(projected, self._qkv.bias, *self._head_norms, turn, made)
        mixed = self._attend_next(made, mask, cache)
        if mixed is None:
            q, k, v = map(mx.array, made)
            keys, values = cache.update_and_fetch(k, v)
            mixed = _by_token(attend(q, keys, values, cache=cache, scale=self._scale, mask=mask))
        return mx.array(self._finish(h, mixed).reshape(x.shape))

    def _attend_next(self, made: tuple[np.ndarray, ...], mask: Any, cache: Any) -> np.ndarray | None:
        """Attend with one token for each row without MLX -> [rows, heads * dim]. None: the cache cannot."""
        attend_next = getattr(cache, "attend_next", None)
        if attend_next is None or mask is not None or made[0].shape[2] != 1:
            return None
        mixed = attend_next(*made, self._scale)
        return None if mixed is None else mixed.reshape(len(mixed), -1)

    def _finish(self, h: np.ndarray, mixed: np.ndarray) -> np.ndarray:
        """Compute the rest of the block after attention."""
        if self._is_small(h):
            out = (self._out.fields, self._out.bias, self._behind_attention.fields)
            down = (self._down.fields, self._down.bias, self._behind_mlp.fields)
            wide = (self._gate_up.fields, self._gate_up.bias, self._activation)
            return cpu_block_kernels.finish(h, mixed, out, (self._between.fields, *wide, *down), self.activations)
        bits = self.activations
        h = h + self._behind_attention(self._out.with_bias(mixed, bits))
        wide = self._gate_up.with_bias(self._between(h), bits)
        return h + self._behind_mlp(self._down.with_bias(self._gate(wide), bits))

    def _is_small(self, h: np.ndarray) -> bool:
        return len(h) < cpu_rows.PARALLEL_ROWS and self.activations != 32

    def _gate(self, x: np.ndarray) -> np.ndarray:
        made = np.empty((len(x), x.shape[1] // 2), np.float32)
        (cpu_rows.gate if len(x) < cpu_rows.PARALLEL_ROWS else cpu_rows.gate_parallel)(x, self._activation, made)
        return made


def _num_heads(attention: Any) -> int:
    return attention.n_heads if hasattr(attention, "n_heads") else attention.num_attention_heads


def _by_token(mixed: mx.array) -> np.ndarray:
    """Arrange [rows, heads, tokens, dim] -> [rows * tokens, heads * dim]"""
    num_rows, heads, tokens, dim = mixed.shape
    return np.ascontiguousarray(np.asarray(mixed).transpose(0, 2, 1, 3)).reshape(num_rows * tokens, heads * dim)


def fuse_blocks(model: nn.Module, known: Mapping[str, int] | None = None) -> dict[str, int]:
    """Give blocks their short form if it computes the same. Return the activations of short forms by the names of their
    blocks. `known`: the result of an earlier trial of the same model; None: every block is tried."""
    turnings: list[RopeTable] = []
    named: dict[int, tuple[str, Any]] = {id(module): (name, module) for name, module in model.named_modules()}
    blocks = [(name, block) for name, block in named.values() if _may_fuse(block)]
    # A short form replaces these modules, so no other block may use them.
    uses = Counter(id(part) for _, block in blocks for part in (block.self_attn, block.mlp))
    found: dict[str, int] = {}
    for name, block in blocks:
        if uses[id(block.self_attn)] == uses[id(block.mlp)] == 1 and (known is None or name in known):
            activation = _fuse(block, turnings, None if known is None else known[name])
            if activation is not None:
                found[name] = activation
    return found


def _may_fuse(module: Any) -> bool:
    wanted = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if not isinstance(module, nn.Module) or not wanted <= set(module):
        return False
    attention, mlp = module["self_attn"], module["mlp"]
    if not {"scale", "rope"} <= {*vars(attention), *attention} or not (_HEADS & set(vars(attention))):
        return False
    q, k, v, o = (attention.get(f"{name}_proj") for name in "qkvo")
    gate, up, down = (mlp.get(f"{name}_proj") for name in ("gate", "up", "down"))
    if not all(isinstance(layer, PackedLinear) for layer in (q, k, v, o, gate, up, down)):
        return False
    # The kernels check no bounds, and write whole tiles.
    dim, rest = divmod(q.weight.shape[0], _num_heads(attention))
    is_whole = not rest and not k.weight.shape[0] % dim and k.weight.shape == v.weight.shape
    is_whole &= gate.weight.shape == up.weight.shape
    # In some models q_proj also makes a gate, and the output layer has half as many inputs: no short form.
    is_whole &= o.weight.shape[1] == q.weight.shape[0] and down.weight.shape[1] == up.weight.shape[0]
    norms = [attention[name] for name in ("q_norm", "k_norm") if attention.get(name) is not None]
    is_whole &= all("weight" in norm and norm.weight.size == dim for norm in norms)
    return is_whole and not any(layer.weight.shape[0] % TILE_ROWS for layer in (q, k, v, o, gate, up, down))


def _fuse(block: Any, turnings: list[RopeTable], known: int | None) -> int | None:
    """Return the activation of the short form, `known` if that is given. None: no short form computes the same, and the
    block is unchanged."""
    try:
        short = _matching_form(block, turnings) if known is None else _form_with(block, turnings, known)
    except Exception as error:  # noqa: BLE001
        # Blocks of other builds raise anything: they need more arguments, return other values, or lack a module.
        log.info("a block stays as it is: %s: %s", type(error).__name__, error)
        return None
    if short is None:
        return None
    short.activations = block.self_attn.q_proj.activations
    block.short = short
    block.__class__ = _fused_class(type(block))
    for owner, names in ((block.self_attn, "qkvo"), (block.mlp, ("gate", "up", "down"))):
        for name in names:
            owner.pop(f"{name}_proj")
    return short.activation


def _matching_form(block: Any, turnings: list[RopeTable]) -> FusedBlock | None:
    """Return the form that computes the same as the block, with exact and with rounded activations."""
    if list(signature(type(block).__call__).parameters) != ["self", "x", "mask", "cache"]:
        return None
    with exact_activations(block):
        wanted = _outputs(block)
    for short in _forms(block, turnings):
        if _is_close(_outputs_of(block, short), wanted):
            short.activations = 16
            return short if _is_close(_outputs_of(block, short), wanted, ROUNDED) else None
    return None


def _forms(block: Any, turnings: list[RopeTable]) -> Iterator[FusedBlock]:
    for activation in (cpu_rows.SILU, cpu_rows.GELU):
        yield _form_with(block, turnings, activation)


def _form_with(block: Any, turnings: list[RopeTable], activation: int) -> FusedBlock:
    attention = block.self_attn
    turning = RopeTable(attention.rope, attention.q_proj.weight.shape[0] // _num_heads(attention))
    same = next((each for each in turnings if each.is_like(turning)), None)
    if same is None:
        turnings.append(turning)
    return FusedBlock(block, same or turning, activation)


def _outputs(block: Any, run: Callable[..., mx.array] | None = None) -> np.ndarray:
    """Return outputs of a short prompt, of a token after it, and of tokens far away, where some blocks differ."""
    dim = block.input_layernorm.weight.shape[0]
    x = mx.random.normal((1, TRIED_TOKENS + 1, dim), key=mx.random.key(7))
    kv = KVCache()
    call = run or block
    made = [call(x[:, :TRIED_TOKENS], mask="causal", cache=kv), call(x[:, TRIED_TOKENS:], mask=None, cache=kv)]
    made.append(call(x, mask="causal", cache=DistantCache()))
    return np.concatenate([flat(each) for each in made])


def _outputs_of(block: Any, short: FusedBlock) -> np.ndarray:
    attend = _attend_of(block)
    return _outputs(block, lambda x, mask, cache: short.run(x, mask, cache, attend))


def _is_close(made: np.ndarray, wanted: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    return bool(np.abs(made - wanted).max() <= tolerance * np.abs(wanted).max())


def _attend_of(block: Any) -> Any:
    """Return the attention function of the model's module, looked up at each call because it is rebound."""
    return sys.modules[type(block.self_attn).__module__].scaled_dot_product_attention  # pyright: ignore


@cache
def _fused_class(kind: type[Any]) -> type[Any]:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self.short.run(x, mask, KVCache() if cache is None else cache, _attend_of(self))

    # The class keeps its name, for messages and for models that look at it.
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
