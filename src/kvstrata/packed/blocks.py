"""A block of a transformer whose products are packed, in a few calls instead of some forty operations of MLX.

For blocks of the common build: norm, attention with RoPE, norm, gated MLP, each with a residual, and norms behind both
where there are some. Which build a block has is tried, not believed: the block itself and its short form compute the
same tokens, and where they differ the block stays as it is. So a model with something else in it is slower, not wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from kvstrata.packed import rows
from kvstrata.packed.form import Activations, exact_activations
from kvstrata.packed.layers import PackedLinear, flat
from kvstrata.packed.weight import PackedWeight, Vectors, joined

# Of the largest value, float32 on both sides.
TOLERANCE = 1e-4
TRIED_TOKENS = 5
_HEADS = {"n_heads", "num_attention_heads"}

NOTHING = np.empty(0, np.float32)


class Turning:
    """How RoPE turns queries and keys: from the model's own module, once for all layers that turn alike."""

    def __init__(self, rope: Any, dim: int) -> None:
        self._rope = rope
        self._dim = dim
        num_turned = min(int(getattr(rope, "dims", dim)), dim)
        is_interleaved = bool(getattr(rope, "traditional", False))
        self.num_pairs = num_turned // 2
        self.step, self.gap = (2, 1) if is_interleaved else (1, num_turned // 2)
        unit = np.zeros(dim, np.float32)
        unit[: self.num_pairs * self.step : self.step] = 1.0
        self._unit = mx.array(unit)
        self._last: tuple[Any, int, np.ndarray] | None = None

    def turned(self, offset: Any, num_rows: int, tokens: int) -> np.ndarray:
        """(1, 0) of each pair, at each token: float32 [rows * tokens, dim]"""
        if self._last is not None and tokens == self._last[1] and _is_same(offset, self._last[0]):
            return self._last[2]
        units = mx.broadcast_to(self._unit, (num_rows, 1, tokens, self._dim))
        made = self._rope(units, offset=offset)
        table = np.ascontiguousarray(flat(made))
        self._last = (offset, tokens, table)
        return table

    def is_like(self, other: Turning) -> bool:
        if (self._dim, self.num_pairs, self.step, self.gap) != (other._dim, other.num_pairs, other.step, other.gap):
            return False
        return all(np.array_equal(self.turned(at, 1, 2), other.turned(at, 1, 2)) for at in (0, 1000))


def _is_same(offset: Any, last: Any) -> bool:
    """Of a batch it is one array for all layers of a pass."""
    return offset is last or (isinstance(offset, int) and isinstance(last, int) and offset == last)


class Fan:
    """Products of one input, side by side."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        weights = [layer.weight for layer in layers]
        whole = joined(weights)
        self.weights: list[PackedWeight] = weights if whole is None else [whole]
        self.num_columns = sum(weight.shape[0] for weight in weights)
        biases = [layer.bias if "bias" in layer else None for layer in layers]
        if any(bias is not None for bias in biases):
            zeros = [mx.zeros(weight.shape[0]) for weight in weights]
            pairs = zip(biases, zeros, strict=True)
            self.bias = flat(mx.concatenate([zero if bias is None else bias for bias, zero in pairs]))[0]
        else:
            self.bias = NOTHING

    def __call__(self, x: Vectors) -> np.ndarray:
        """Without the bias."""
        made, first = np.empty((len(x.values), self.num_columns), np.float32), 0
        for weight in self.weights:
            weight.multiply(x, made, first)
            first += weight.shape[0]
        return made


class Norm:
    """RMS norm over the last axis. Its weights are what the model's own module does to a vector of ones."""

    def __init__(self, module: Any) -> None:
        self.eps = np.float32(module.eps)
        dim = module.weight.shape[0]
        self.weight = flat(module(mx.ones((1, dim))))[0] * np.sqrt(np.float32(1) + self.eps)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        made = np.empty_like(x)
        (rows.norm if len(x) < rows.PARALLEL_ROWS else rows.norm_parallel)(x, self.weight, self.eps, made)
        return made


class ShortBlock(nn.Module):
    """The block in few calls. Its arrays are parameters, as those of the layers that it takes the place of were."""

    def __init__(self, block: Any, turning: Turning, activation: int) -> None:
        super().__init__()
        attention, mlp = block.self_attn, block.mlp
        self._turning = turning
        self._activation = np.int64(activation)
        self._scale = attention.scale
        self._qkv = Fan([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out, self._down = Fan([attention.o_proj]), Fan([mlp.down_proj])
        self._gate_up = Fan([mlp.gate_proj, mlp.up_proj])
        self._before = Norm(block.input_layernorm)
        has_both = "pre_feedforward_layernorm" in block
        self._between = Norm(block.pre_feedforward_layernorm if has_both else block.post_attention_layernorm)
        self._behind_attention = Norm(block.post_attention_layernorm) if has_both else None
        self._behind_mlp = Norm(block.post_feedforward_layernorm) if has_both else None
        self._head_norms = tuple(Norm(attention[name]) if name in attention else None for name in ("q_norm", "k_norm"))
        self._dim = attention.q_proj.weight.shape[0] // _num_heads(attention)
        num_kv_heads = attention.k_proj.weight.shape[0] // self._dim
        self._num_heads = (_num_heads(attention), num_kv_heads, num_kv_heads)
        self.activations: Activations = 32
        fans = (self._qkv, self._out, self._gate_up, self._down)
        self.arrays = [array for fan in fans for weight in fan.weights for array in weight.arrays]
        self.freeze()

    def run(self, x: mx.array, mask: Any, cache: Any, attend: Any) -> mx.array:
        num_rows, tokens, _ = x.shape
        h = flat(x)
        projected = self._qkv(self._vectors(self._before(h)))
        q, k, v = self._heads(projected, cache.offset, num_rows, tokens)
        keys, values = cache.update_and_fetch(k, v)
        mixed = attend(q, keys, values, cache=cache, scale=self._scale, mask=mask)
        h = h + _behind(self._product(self._out, _by_token(mixed)), self._behind_attention)
        wide = self._product(self._gate_up, self._between(h))
        h = h + _behind(self._product(self._down, self._gated(wide)), self._behind_mlp)
        return mx.array(h).reshape(x.shape)

    def _vectors(self, x: np.ndarray) -> Vectors:
        return Vectors(x, self.activations)

    def _product(self, fan: Fan, x: np.ndarray) -> np.ndarray:
        made = fan(self._vectors(x))
        if len(fan.bias):
            made += fan.bias
        return made

    def _heads(self, x: np.ndarray, offset: Any, num_rows: int, tokens: int) -> list[mx.array]:
        turning = self._turning
        turn = (turning.turned(offset, num_rows, tokens), turning.num_pairs, turning.step, turning.gap)
        made = tuple(np.empty((num_rows, num, tokens, self._dim), np.float32) for num in self._num_heads)
        norms = tuple(NOTHING if norm is None else norm.weight for norm in self._head_norms)
        eps = np.float32(0) if self._head_norms[0] is None else self._head_norms[0].eps
        (rows.heads if len(x) < rows.PARALLEL_ROWS else rows.heads_parallel)(x, self._qkv.bias, norms, eps, turn, made)
        return [mx.array(array) for array in made]

    def _gated(self, x: np.ndarray) -> np.ndarray:
        made = np.empty((len(x), x.shape[1] // 2), np.float32)
        (rows.gate if len(x) < rows.PARALLEL_ROWS else rows.gate_parallel)(x, self._activation, made)
        return made


def _num_heads(attention: Any) -> int:
    return attention.n_heads if hasattr(attention, "n_heads") else attention.num_attention_heads


def _behind(x: np.ndarray, norm: Norm | None) -> np.ndarray:
    return x if norm is None else norm(x)


def _by_token(mixed: mx.array) -> np.ndarray:
    """[rows, heads, tokens, dim] -> [rows * tokens, heads * dim]"""
    num_rows, heads, tokens, dim = mixed.shape
    mx.eval(mixed)
    values = np.asarray(mixed)
    return np.ascontiguousarray(values.transpose(0, 2, 1, 3)).reshape(num_rows * tokens, heads * dim)


def shorten(model: nn.Module) -> int:
    """Gives blocks their short form where it computes the same. Tells how many have one."""
    turnings: list[Turning] = []
    blocks = [module for _, module in model.named_modules() if _may_be_short(module)]
    return sum(_shorten(block, turnings) for block in blocks)


def _may_be_short(module: Any) -> bool:
    wanted = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if not isinstance(module, nn.Module) or not wanted <= set(module):
        return False
    attention, mlp = module["self_attn"], module["mlp"]
    if not {"scale", "rope"} <= {*vars(attention), *attention} or not (_HEADS & set(vars(attention))):
        return False
    layers = [attention.get(f"{name}_proj") for name in "qkvo"]
    layers += [mlp.get(f"{name}_proj") for name in ("gate", "up", "down")]
    return all(isinstance(layer, PackedLinear) for layer in layers)


def _shorten(block: Any, turnings: list[Turning]) -> bool:
    """False: no short form computes the same, and the block is as it was."""
    with exact_activations(block):
        wanted = _outputs(block)
        short = next((form for form in _forms(block, turnings) if _is_close(_outputs_of(block, form), wanted)), None)
    if short is None:
        return False
    short.activations = block.self_attn.q_proj.activations
    block.short = short
    block.__class__ = _short_kind(type(block))
    for owner, names in ((block.self_attn, "qkvo"), (block.mlp, ("gate", "up", "down"))):
        for name in names:
            owner.pop(f"{name}_proj")
    return True


def _forms(block: Any, turnings: list[Turning]) -> Iterator[ShortBlock]:
    attention = block.self_attn
    turning = Turning(attention.rope, attention.q_proj.weight.shape[0] // _num_heads(attention))
    same = next((each for each in turnings if each.is_like(turning)), None)
    if same is None:
        turnings.append(turning)
    for activation in (rows.SILU, rows.GELU):
        yield ShortBlock(block, same or turning, activation)


def _outputs(block: Any, run: Callable[..., mx.array] | None = None) -> np.ndarray:
    """Of a short prompt, and of a token after it."""
    dim = block.input_layernorm.weight.shape[0]
    x = mx.random.normal((1, TRIED_TOKENS + 1, dim), key=mx.random.key(7))
    kv = KVCache()
    call = run or block
    made = [call(x[:, :TRIED_TOKENS], mask="causal", cache=kv), call(x[:, TRIED_TOKENS:], mask=None, cache=kv)]
    return np.concatenate([flat(each) for each in made])


def _outputs_of(block: Any, short: ShortBlock) -> np.ndarray:
    attend = _attend_of(block)
    return _outputs(block, lambda x, mask, cache: short.run(x, mask, cache, attend))


def _is_close(made: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(made - wanted).max() <= TOLERANCE * np.abs(wanted).max())


def _attend_of(block: Any) -> Any:
    """What the model's own attention calls. Looked up anew: it is rebound."""
    return sys.modules[type(block.self_attn).__module__].scaled_dot_product_attention  # pyright: ignore


@cache
def _short_kind(kind: type[Any]) -> type[Any]:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self.short.run(x, mask, KVCache() if cache is None else cache, _attend_of(self))

    # The name stays: messages, and models that look at it, see what they know.
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
