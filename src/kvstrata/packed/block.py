"""Fused transformer block with packed weights: two kernel calls around attention instead of some forty MLX operations.

A fused block replaces a block of the common build: norm, attention with RoPE, norm, gated MLP, each with a residual,
and optional norms behind both. A trial decides whether a block has this build: the block and its fused form compute the
same tokens, and if the outputs differ, the block stays. A model of another build is therefore slower, not wrong.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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

# Largest difference in a trial, as a share of the largest value.
EXACT_TOLERANCE = 1e-4  # float32 on both sides
ROUNDED_TOLERANCE = 1e-2  # activations of the fused block rounded to 16 bits
TRIAL_TOKENS = 5

MAX_WEIGHTS = 3  # that share an input: q, k and v

_NUM_HEADS = {"n_heads", "num_attention_heads"}

EMPTY = np.empty(0, np.float32)


class RopeTable:
    """RoPE rotation of queries and keys, computed by the model's own module and shared by layers that rotate alike."""

    def __init__(self, rope: Any, dim: int) -> None:
        self._rope = rope
        self._dim = dim
        num_rotated = min(int(getattr(rope, "dims", dim)), dim)
        is_interleaved = bool(getattr(rope, "traditional", False))
        num_pairs = num_rotated // 2
        # Number of pairs of dims, distance from a pair to the next, distance from the first dim to the second.
        self.pair_layout = (num_pairs, 2, 1) if is_interleaved else (num_pairs, 1, num_pairs)
        unit = np.zeros(dim, np.float32)
        unit[: num_pairs * self.pair_layout[1] : self.pair_layout[1]] = 1.0
        self._unit = mx.array(unit)
        # Positions and table of the last forward pass, which all its layers share.
        self._last: tuple[Any, np.ndarray] = (None, EMPTY)

    def rotation_at(self, offset: mx.array | int, num_rows: int, tokens: int) -> np.ndarray:
        """Return (cos, sin) of each pair, at each token: float32 [rows * tokens, dim]."""
        # Offsets are compared by value: mlx-lm adds to its arrays of offsets in place.
        positions = (offset if isinstance(offset, int) else np.asarray(offset).tobytes(), num_rows, tokens)
        if self._last[0] != positions:
            # The rotation of (1, 0) is (cos, sin).
            units = mx.broadcast_to(self._unit, (num_rows, 1, tokens, self._dim))
            self._last = (positions, flat(self._rope(units, offset=offset)))
        return self._last[1]

    def rotates_like(self, other: RopeTable) -> bool:
        if (self._dim, self.pair_layout) != (other._dim, other.pair_layout):
            return False
        return all(np.array_equal(self.rotation_at(at, 1, 2), other.rotation_at(at, 1, 2)) for at in (0, 1000))


class FusedLinear:
    """Linear layers that share an input, with their outputs side by side."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        weights = [layer.weight for layer in layers]
        joined = join_weights(weights)
        self.weights: list[PackedWeight] = weights if joined is None else [joined]
        self.num_columns = sum(weight.shape[0] for weight in weights)
        self._bias = _join_biases(layers)
        self.bias = EMPTY if self._bias is None else np.asarray(self._bias)
        # Always the same number of weights, because numba compiles the kernels anew for each number.
        empty = PackedWeight(mx.zeros(0, mx.uint8), mx.zeros(0, mx.uint8), weights[0].form, 0)
        padding = [empty] * (MAX_WEIGHTS - len(self.weights))
        self.fields = tuple(weight.fields for weight in (*self.weights, *padding))

    @property
    def arrays(self) -> list[mx.array]:
        weights = [array for weight in self.weights for array in weight.arrays]
        return weights if self._bias is None else [*weights, self._bias]

    def multiply(self, x: np.ndarray, activations: Activations, *, adds_bias: bool = True) -> np.ndarray:
        vectors = ActivationVectors(x, activations)
        out, first = np.empty((len(x), self.num_columns), np.float32), 0
        for weight in self.weights:
            weight.multiply(vectors, out, first)
            first += weight.shape[0]
        if adds_bias and len(self.bias):
            out += self.bias
        return out


def _join_biases(layers: Sequence[PackedLinear]) -> mx.array | None:
    """Concatenate the biases, zeros for a layer without a bias; None if no layer has one."""
    if not any("bias" in layer for layer in layers):
        return None
    biases = [layer.bias if "bias" in layer else mx.zeros(layer.weight.shape[0]) for layer in layers]
    joined = mx.concatenate(biases)
    mx.eval(joined)
    return joined


class RmsNorm:
    """RMS norm over the last axis; without a module it returns its input.

    The weights are found by applying the model's own module to a vector of ones, since some modules add 1 to them.
    """

    def __init__(self, module: Any = None) -> None:
        self.weight, self.eps = EMPTY, np.float32(0)
        if module is not None:
            self.eps = np.float32(module.eps)
            dim = module.weight.shape[0]
            self.weight = flat(module(mx.ones((1, dim))))[0] * np.sqrt(np.float32(1) + self.eps)
        self.fields = (self.weight, self.eps)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if not len(self.weight):
            return x
        out = np.empty_like(x)
        (cpu_rows.norm if len(x) < cpu_rows.PARALLEL_ROWS else cpu_rows.norm_parallel)(x, self.weight, self.eps, out)
        return out


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """Weights of a block of the common build, as kernels read them."""

    attention_norm: RmsNorm
    qkv: FusedLinear
    q_norm: RmsNorm  # of each head, as `k_norm`
    k_norm: RmsNorm
    rope: RopeTable
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of scores
    attention_out: FusedLinear
    attention_post_norm: RmsNorm
    mlp_norm: RmsNorm
    gate_up: FusedLinear
    activation: np.int64  # of the gate: SILU or GELU of cpu/rows.py
    down: FusedLinear
    mlp_post_norm: RmsNorm

    @classmethod
    def of_block(cls, block: Any, rope: RopeTable, activation: int) -> BlockWeights:
        attention, mlp = block.self_attn, block.mlp
        has_post_norms = "pre_feedforward_layernorm" in block
        head_dim = attention.q_proj.weight.shape[0] // _num_heads(attention)
        return cls(
            attention_norm=RmsNorm(block.input_layernorm),
            qkv=FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj]),
            q_norm=RmsNorm(attention.get("q_norm")),
            k_norm=RmsNorm(attention.get("k_norm")),
            rope=rope,
            num_heads=_num_heads(attention),
            num_kv_heads=attention.k_proj.weight.shape[0] // head_dim,
            head_dim=head_dim,
            scale=attention.scale,
            attention_out=FusedLinear([attention.o_proj]),
            attention_post_norm=RmsNorm(block.post_attention_layernorm if has_post_norms else None),
            mlp_norm=RmsNorm(block.pre_feedforward_layernorm if has_post_norms else block.post_attention_layernorm),
            gate_up=FusedLinear([mlp.gate_proj, mlp.up_proj]),
            activation=np.int64(activation),
            down=FusedLinear([mlp.down_proj]),
            mlp_post_norm=RmsNorm(block.post_feedforward_layernorm if has_post_norms else None),
        )

    @property
    def arrays(self) -> list[mx.array]:
        linears = (self.qkv, self.attention_out, self.gate_up, self.down)
        return [array for linear in linears for array in linear.arrays]

    @cached_property
    def projection(self) -> tuple[Any, Any, Any]:
        """Norm, weights and biases of q, k and v, in the order of `cpu_block_kernels.project`."""
        return self.attention_norm.fields, self.qkv.fields, self.qkv.bias

    @cached_property
    def head_norms(self) -> tuple[Any, Any]:
        """Weights and epsilon of the norms of heads."""
        return (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps

    @cached_property
    def output(self) -> tuple[Any, ...]:
        """Output of attention, in the order of `cpu_block_kernels.finish`."""
        return self.attention_out.fields, self.attention_out.bias, self.attention_post_norm.fields

    @cached_property
    def mlp(self) -> tuple[Any, ...]:
        """MLP with its norms, in the order of `cpu_block_kernels.finish`."""
        wide = (self.gate_up.fields, self.gate_up.bias, self.activation)
        return self.mlp_norm.fields, *wide, self.down.fields, self.down.bias, self.mlp_post_norm.fields


class FusedBlock(nn.Module):
    """Forward pass of a block over `BlockWeights`. Its arrays are parameters, as those of the layers it replaces."""

    def __init__(self, weights: BlockWeights) -> None:
        super().__init__()
        self.weights = weights
        self.activations: Activations = 32
        self.arrays = weights.arrays
        self.freeze()

    def run(self, x: mx.array, mask: Any, cache: Any, attend: Any) -> mx.array:
        weights, h, bits = self.weights, flat(x), self.activations
        num_rows, tokens, _ = x.shape
        kv_shape = (num_rows, weights.num_kv_heads, tokens, weights.head_dim)
        q = np.empty((num_rows, weights.num_heads, tokens, weights.head_dim), np.float32)
        qkv = (q, np.empty(kv_shape, np.float32), np.empty(kv_shape, np.float32))
        rotation = (weights.rope.rotation_at(cache.offset, num_rows, tokens), *weights.rope.pair_layout)
        is_small = len(h) < cpu_rows.PARALLEL_ROWS
        # Kernels of whole blocks compute few tokens, with rounded activations.
        is_whole = is_small and bits != 32
        if is_whole:
            cpu_block_kernels.project(h, *weights.projection, bits, *weights.head_norms, rotation, qkv)
        else:
            projected = weights.qkv.multiply(weights.attention_norm(h), bits, adds_bias=False)
            heads = cpu_rows.heads if is_small else cpu_rows.heads_parallel
            heads(projected, weights.qkv.bias, *weights.head_norms, rotation, qkv)
        mixed = None if mask is not None or tokens != 1 else self._attend_next(qkv, cache)
        if mixed is None:
            keys, values = cache.update_and_fetch(mx.array(qkv[1]), mx.array(qkv[2]))
            mixed = _by_token(attend(mx.array(q), keys, values, cache=cache, scale=weights.scale, mask=mask))
        if is_whole:
            out = cpu_block_kernels.finish(h, mixed, weights.output, weights.mlp, bits)
        else:
            out = self._finish(h, mixed)
        return mx.array(out.reshape(x.shape))

    def _attend_next(self, qkv: tuple[np.ndarray, ...], cache: Any) -> np.ndarray | None:
        """Attend with one token for each row, without MLX -> [rows, heads * dim]. None: the cache cannot."""
        attend_next = getattr(cache, "attend_next", None)
        mixed = None if attend_next is None else attend_next(*qkv, self.weights.scale)
        return None if mixed is None else mixed.reshape(len(mixed), -1)

    def _finish(self, h: np.ndarray, mixed: np.ndarray) -> np.ndarray:
        """Compute the rest of the block after attention, one operation at a time."""
        weights, bits = self.weights, self.activations
        h = h + weights.attention_post_norm(weights.attention_out.multiply(mixed, bits))
        wide = weights.gate_up.multiply(weights.mlp_norm(h), bits)
        return h + weights.mlp_post_norm(weights.down.multiply(_gate(wide, weights.activation), bits))


def _gate(x: np.ndarray, activation: np.int64) -> np.ndarray:
    out = np.empty((len(x), x.shape[1] // 2), np.float32)
    (cpu_rows.gate if len(x) < cpu_rows.PARALLEL_ROWS else cpu_rows.gate_parallel)(x, activation, out)
    return out


def _num_heads(attention: Any) -> int:
    return attention.n_heads if hasattr(attention, "n_heads") else attention.num_attention_heads


def _by_token(mixed: mx.array) -> np.ndarray:
    """Arrange [rows, heads, tokens, dim] -> [rows * tokens, heads * dim]"""
    num_rows, heads, tokens, dim = mixed.shape
    return np.ascontiguousarray(np.asarray(mixed).transpose(0, 2, 1, 3)).reshape(num_rows * tokens, heads * dim)


def fuse_blocks(model: nn.Module, known: Mapping[str, int] | None = None) -> dict[str, int]:
    """Fuse the blocks of a model whose fused form computes the same.

    Return the activation function of each fused block, by the block's name. `known`: the result of an earlier call for
    the same model, which saves the trials; None: every block is tried.
    """
    ropes: list[RopeTable] = []
    named: dict[int, tuple[str, Any]] = {id(module): (name, module) for name, module in model.named_modules()}
    blocks = [(name, block) for name, block in named.values() if _can_fuse(block)]
    # Fusing takes these modules apart, so no other block may use them.
    uses = Counter(id(part) for _, block in blocks for part in (block.self_attn, block.mlp))
    fused: dict[str, int] = {}
    for name, block in blocks:
        if uses[id(block.self_attn)] == uses[id(block.mlp)] == 1 and (known is None or name in known):
            activation = _fuse(block, ropes, None if known is None else known[name])
            if activation is not None:
                fused[name] = activation
    return fused


def _can_fuse(module: Any) -> bool:
    """Whether a module has the parts of a common block, in shapes that the kernels can take."""
    wanted = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if not isinstance(module, nn.Module) or not wanted <= set(module):
        return False
    attention, mlp = module["self_attn"], module["mlp"]
    if not {"scale", "rope"} <= {*vars(attention), *attention} or not (_NUM_HEADS & set(vars(attention))):
        return False
    q, k, v, o = (attention.get(f"{name}_proj") for name in "qkvo")
    gate, up, down = (mlp.get(f"{name}_proj") for name in ("gate", "up", "down"))
    if not all(isinstance(layer, PackedLinear) for layer in (q, k, v, o, gate, up, down)):
        return False
    # The kernels check no bounds, and write whole tiles.
    dim, rest = divmod(q.weight.shape[0], _num_heads(attention))
    has_shapes = not rest and not k.weight.shape[0] % dim and k.weight.shape == v.weight.shape
    has_shapes &= gate.weight.shape == up.weight.shape
    # In some models q_proj also computes a gate, and the output layer has half as many inputs: these stay.
    has_shapes &= o.weight.shape[1] == q.weight.shape[0] and down.weight.shape[1] == up.weight.shape[0]
    norms = [attention[name] for name in ("q_norm", "k_norm") if attention.get(name) is not None]
    has_shapes &= all("weight" in norm and norm.weight.size == dim for norm in norms)
    return has_shapes and not any(layer.weight.shape[0] % TILE_ROWS for layer in (q, k, v, o, gate, up, down))


def _fuse(block: Any, ropes: list[RopeTable], known: int | None) -> int | None:
    """Fuse a block and return its activation function, `known` if that is given. None: no fused form computes the same,
    and the block is unchanged."""
    try:
        fused = _matching_form(block, ropes) if known is None else _fused_form(block, ropes, known)
    except Exception as error:  # noqa: BLE001
        # Blocks of other builds raise anything: they need more arguments, return other values, or lack a module.
        log.info("a block stays as it is: %s: %s", type(error).__name__, error)
        return None
    if fused is None:
        return None
    fused.activations = block.self_attn.q_proj.activations
    block.fused = fused
    block.__class__ = _fused_class(type(block))
    for owner, names in ((block.self_attn, "qkvo"), (block.mlp, ("gate", "up", "down"))):
        for name in names:
            owner.pop(f"{name}_proj")
    return int(fused.weights.activation)


def _matching_form(block: Any, ropes: list[RopeTable]) -> FusedBlock | None:
    """Return the fused form that computes the same as the block, with exact and with rounded activations."""
    if list(signature(type(block).__call__).parameters) != ["self", "x", "mask", "cache"]:
        return None
    with exact_activations(block):
        expected = _outputs(block)
    for fused in _fused_forms(block, ropes):
        if _is_close(_outputs_of_form(block, fused), expected, EXACT_TOLERANCE):
            fused.activations = 16
            return fused if _is_close(_outputs_of_form(block, fused), expected, ROUNDED_TOLERANCE) else None
    return None


def _fused_forms(block: Any, ropes: list[RopeTable]) -> Iterator[FusedBlock]:
    for activation in (cpu_rows.SILU, cpu_rows.GELU):
        yield _fused_form(block, ropes, activation)


def _fused_form(block: Any, ropes: list[RopeTable], activation: int) -> FusedBlock:
    attention = block.self_attn
    rope = RopeTable(attention.rope, attention.q_proj.weight.shape[0] // _num_heads(attention))
    shared = next((each for each in ropes if each.rotates_like(rope)), None)
    if shared is None:
        ropes.append(rope)
    return FusedBlock(BlockWeights.of_block(block, shared or rope, activation))


class DistantCache:
    """Cache of a sequence at a large position, which returns only the new tokens."""

    offset = 20_000

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def _outputs(block: Any, run: Callable[..., mx.array] | None = None) -> np.ndarray:
    """Return outputs of a short prompt, of a token after it, and of tokens far away, where some blocks differ."""
    dim = block.input_layernorm.weight.shape[0]
    x = mx.random.normal((1, TRIAL_TOKENS + 1, dim), key=mx.random.key(7))
    kv = KVCache()
    call = run or block
    outputs = [call(x[:, :TRIAL_TOKENS], mask="causal", cache=kv), call(x[:, TRIAL_TOKENS:], mask=None, cache=kv)]
    outputs.append(call(x, mask="causal", cache=DistantCache()))
    return np.concatenate([flat(each) for each in outputs])


def _outputs_of_form(block: Any, fused: FusedBlock) -> np.ndarray:
    attend = _attention_of(block)
    return _outputs(block, lambda x, mask, cache: fused.run(x, mask, cache, attend))


def _is_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())


def _attention_of(block: Any) -> Any:
    """Return the attention function of the model's module, looked up at each call because it is rebound."""
    return sys.modules[type(block.self_attn).__module__].scaled_dot_product_attention  # pyright: ignore


@cache
def _fused_class(kind: type[Any]) -> type[Any]:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self.fused.run(x, mask, KVCache() if cache is None else cache, _attention_of(self))

    # The class keeps its name, for messages and for models that look at it.
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
