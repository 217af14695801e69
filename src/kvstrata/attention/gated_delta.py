"""The gated delta rule: the recurrent layers of Qwen3-Next, Qwen3.5, Kimi Linear and others.

Each head has a state S [v_dim, k_dim]. For each token, with its gate g, its share beta, and its q, k and v:

    S = g * S + delta * k^T    where delta = beta * (v - g * S k)
    y = S q

mlx-lm has a Metal kernel for most head sizes and otherwise goes token by token, some ten operations each. There a CPU
runs a loop of our own (cpu/gated_delta.py), and other machines compute blocks of tokens at once, by matrix products.
Few tokens, and gates for each entry of a key, still go token by token where there is no loop.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import gated_delta as stock

from kvstrata.attention.cpu import gated_delta as cpu_gated_delta

BLOCK = 64  # tokens
# Fewer tokens than this go token by token, which takes fewer operations.
FEWEST = 8
# Rows of a triangular matrix that are inverted at once, as a sum of powers. Powers of a larger matrix have entries so
# large that their float32 sum loses the result to cancellation. 8 rows suffice for shares of up to 1; towards 2, which
# few models have, and for keys that are all alike, errors grow to 1e-4.
_CORNER = 8
_LOG_OF_ZERO = -80.0  # such a gate leaves nothing of the state

_by_token = stock.gated_delta_ops


def install() -> None:
    """Make models of mlx-lm call `update` where they would go token by token."""
    stock.gated_delta_ops = update


def update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the output [rows, tokens, heads, v_dim] and the new state. q, k [rows, tokens, k_heads, k_dim],
    v [rows, tokens, heads, v_dim], beta [rows, tokens, heads], g the same or one for each entry of a key [..., k_dim],
    state [rows, heads, v_dim, k_dim]. Where `mask` [rows, tokens] is False, the state does not change."""
    if state is None:
        state = mx.zeros((q.shape[0], v.shape[2], v.shape[3], k.shape[3]))
    if mask is not None:
        g = mx.where(mask.reshape(*mask.shape, *[1] * (g.ndim - 2)), g, mx.array(1, g.dtype))
        beta = mx.where(mask[..., None], beta, mx.array(0, beta.dtype))
        # Masked tokens may be NaN, and 0 times NaN is NaN.
        k, v = (mx.where(mask[..., None, None], array, mx.array(0, array.dtype)) for array in (k, v))
    if cpu_gated_delta.takes(q, k, v, g, beta, state):
        return cpu_gated_delta.update(q, k, v, g, beta, state)
    if g.ndim == 4 or q.shape[1] < FEWEST:
        return _by_token(q, k, v, g, beta, state)
    return by_blocks(q, k, v, g, beta, state)


def by_blocks(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute the rule in blocks of tokens, with one gate for each head. Within a block each delta depends on earlier
    deltas: a triangular system, solved for all blocks at once. After that only the state passes from block to block.
    NaN in a token makes its block NaN."""
    dtype, tokens, heads = q.dtype, q.shape[1], v.shape[2]
    size = min(BLOCK, 1 << (tokens - 1).bit_length())
    q, k, v = (_in_blocks(array, size, 0.0) for array in (q, k, v))
    gates, beta = (
        _in_blocks(array, size, fill)[..., 0] for array, fill in ((g[..., None], 1.0), (beta[..., None], 0.0))
    )
    keys = k.swapaxes(-1, -2)
    read, known = q @ keys, k @ keys
    if heads > k.shape[2]:
        q, k, read, known = (mx.repeat(array, heads // k.shape[2], 2) for array in (q, k, read, known))

    logs = mx.maximum(mx.log(gates), _LOG_OF_ZERO)
    since_start = mx.exp(mx.cumsum(logs, -1))[..., None]
    # Share of an earlier token's delta (columns) that is left at a later token (rows). The sum starts at the earlier
    # token: a difference of two sums from the start of the block would lose precision.
    left = mx.exp(mx.cumsum(mx.tril(mx.broadcast_to(logs[..., None], (*logs.shape, size)), -1), -2))
    solved = _inverse(mx.tril(beta[..., None] * left * known, -1)) * beta[..., None, :]
    read = mx.tril(read * left)
    # A delta is `added` less `forgotten` times the state that the block begins with.
    added, forgotten = solved @ v, solved @ (k * since_start)
    from_start = mx.concatenate([forgotten, q * since_start - read @ forgotten], -2)
    keys = mx.contiguous((k * left[..., -1, :, None]).swapaxes(-1, -2))

    running = mx.contiguous(state.astype(mx.float32).swapaxes(-1, -2))
    outputs = []
    for i in range(len(q)):
        found = from_start[i] @ running
        outputs.append(found[..., size:, :])
        running = since_start[i, ..., -1:, :] * running + keys[i] @ (added[i] - found[..., :size, :])
    out = (read @ added + mx.stack(outputs)).transpose(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]
    return out.astype(dtype), running.swapaxes(-1, -2).astype(state.dtype)


def _in_blocks(array: mx.array, size: int, fill: float) -> mx.array:
    """Arrange [rows, tokens, heads, dim] -> float32 [blocks, rows, heads, size, dim]; the last block is padded."""
    missing = -array.shape[1] % size
    if missing:
        array = mx.pad(array, [(0, 0), (0, missing), (0, 0), (0, 0)], constant_values=mx.array(fill, array.dtype))
    return mx.contiguous(mx.unflatten(array.astype(mx.float32), 1, (-1, size)).transpose(1, 0, 3, 2, 4))


def _inverse(below: mx.array) -> mx.array:
    """Return the inverse of I + below. `below` [..., size, size] is zero on and above the diagonal; size: a power of 2.

    With A for `below`, the inverse of each corner is (I - A)(I + A^2)(I + A^4), because A^8 is 0. Then two corners X, Z
    with Y below X have the inverse with corners X^-1, Z^-1 and with -Z^-1 Y X^-1 below X^-1."""
    size = below.shape[-1]
    num = min(_CORNER, size)
    power = _corners(below, num)
    found = mx.eye(num) - power
    for _ in range(1, num.bit_length() - 1):
        power = power @ power
        found = found + found @ power
    while num < size:
        between = _corners(below, 2 * num)[..., num:, :num]
        first, second = found[..., ::2, :, :], found[..., 1::2, :, :]
        upper = mx.concatenate([first, mx.zeros_like(first)], -1)
        lower = mx.concatenate([-(second @ between @ first), second], -1)
        found = mx.concatenate([upper, lower], -2)
        num *= 2
    return found.squeeze(-3)


def _corners(matrix: mx.array, num: int) -> mx.array:
    """Return the square blocks along the diagonal: [..., size, size] -> [..., size / num, num, num]."""
    count = matrix.shape[-1] // num
    blocks = mx.unflatten(mx.unflatten(matrix, -1, (count, num)), -3, (count, num))
    return mx.contiguous(mx.moveaxis(mx.diagonal(blocks, axis1=-4, axis2=-2), -1, -3))
