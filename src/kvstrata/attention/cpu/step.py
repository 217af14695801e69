"""Attention on a plain CPU in float32: kernels of our own on MLX's memory.

On a CPU MLX's `exp` is scalar and runs on one core, and each operation of MLX costs about 10 us. Here a softmax is ten
times faster, and a decode step of a whole batch, in one layer, is one call that writes the new tokens and attends to
all. Matrix products stay with MLX, which hands them to BLAS.

The kernels read computed memory, so attention evaluates the graph: on a CPU that costs nothing. The kernels need numba,
which the extra `cpu` installs; without numba MLX's own operations are used.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.segments import DecodeRow, KvSlot, RawSegment, SealedSegment, Segment, SegmentSlice
from kvstrata.codecs.backends import runtime
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cpu import planes as codecs_cpu
from kvstrata.codecs.cpu.planes import hadamard_of, threads_for
from kvstrata.codecs.mean_runs import GROUP_TOKENS
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.rope import tables

# Queries in a block of a causal prefill: keys that no query of the block sees are not multiplied.
BLOCK = 128

# Some times as long as the kernels of codecs/ take to compile. After this time they are compiled here.
COMPILE_S = 120

# Fewest numbers read by a step of a batch that are worth sharing with other threads: if the products before the step
# have woken the threads, and if the products may have run on threads of BLAS.
PARALLEL_AWAKE, PARALLEL_ASLEEP = 1 << 16, 1 << 18

NOWHERE = -1

RAW_BITS = 32  # as in cpu/kernels.py, which imports numba

_NO_SINKS = np.empty(0, np.float32)

# The process that compiles kernels for this one, if any.
_beside: list[subprocess.Popen[bytes]] = []


class ArrayLayout(NamedTuple):
    """Memory layout of keys or values: raw, or encoded, with the addresses of all planes but `top`."""

    bits: int = RAW_BITS
    next_address: int = 0
    low_address: int = 0
    scales_address: int = 0
    means_address: int = 0
    ends_address: int = 0  # int64: the first token after each mean run
    num_mean_runs: int = 0
    columns_address: int = 0  # float32 [dim, 256]: see `RotationTables` of codecs/rope.py
    offset: int = 0  # of the first token in the group that shares a mean
    first_dim: int = 0  # of the dims that RoPE rotates
    num_pairs: int = 0  # 0: the means are plain, not RoPE-aware
    step: int = 0  # from a pair to the next
    gap: int = 0  # from the first dim of a pair to its second


RAW = ArrayLayout()


class TokenRun(NamedTuple):
    """Tokens [start, start + num_tokens) of contiguous arrays [kv_heads, size, ...]."""

    k_address: int  # of the values, or of plane `top`
    v_address: int
    size: int
    write_at: int  # the slot of `size` that the new token goes to; NOWHERE: not into this run
    num_tokens: int  # the new one included
    start: int = 0
    k: ArrayLayout = RAW
    v: ArrayLayout = RAW
    holds: tuple[Any, ...] = ()  # arrays behind the addresses; a slot's buffer is kept alive by its layer

    def fields(self) -> tuple[int, ...]:
        """The fields in the order in which the kernels read them."""
        return (*self[:6], *self.k, *self.v)


def available() -> bool:
    return runtime().backend == "cpu"


def fits(*arrays: mx.array) -> bool:
    return available() and all(array.dtype == mx.float32 for array in arrays)


def warm_up() -> None:
    """Compile every kernel now: a kernel that is not on disk yet takes seconds."""
    if not available():
        return
    from kvstrata.attention.cpu import kernels as cpu_kernels

    tokens, buffer = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 2, 4), np.float32)
    runs = np.array([(0, *TokenRun(buffer.ctypes.data, buffer.ctypes.data, 2, 0, 1).fields())], np.int64)
    compile_codecs_beside()
    try:
        cpu_kernels.write(tokens, tokens, runs)
        rotations = (*hadamard_of(4), *hadamard_of(4))
        cpu_kernels.decode(tokens, 1, runs, 1.0, _NO_SINKS, *rotations, np.zeros_like(tokens))
        cpu_kernels.softmax_causal(np.zeros((1, 1), np.float32), 0, 1)
        for other in _beside:
            with suppress(subprocess.TimeoutExpired):
                other.wait(COMPILE_S)
    finally:
        while _beside:
            other = _beside.pop()
            other.kill()
            other.wait()
    codecs_cpu.warm_up()


def compile_codecs_beside() -> None:
    """On the very first start, compile the kernels of codecs/ to disk in another process. Call this before a model is
    loaded, and `warm_up` after that.

    Numba compiles one function at a time in a process. Kernels that the other process does not finish compile here.
    """
    if _beside or not available() or _is_on_disk() or not sys.executable:
        return
    code = "import kvstrata; from kvstrata.codecs.cpu import planes; planes.warm_up()"
    quiet = subprocess.DEVNULL
    with suppress(OSError):
        # -P: nothing is imported from the folder that the server was started in.
        _beside.append(subprocess.Popen([sys.executable, "-P", "-c", code], stdin=quiet, stdout=quiet, stderr=quiet))


def _is_on_disk() -> bool:
    """Whether the kernels of codecs/ were compiled since their text changed, judged by one of them."""
    from kvstrata.codecs.cpu import kernels as codec_kernels

    last = codec_kernels.mix_planes
    changed_s = Path(str(codec_kernels.__file__)).stat().st_mtime
    kept = Path(str(last.stats.cache_path)).glob(f"*.{last.__name__}-*.nbi")
    return any(path.stat().st_mtime >= changed_s for path in kept)


class CpuStep:
    """New tokens, one for each row, not written yet. Replaces both keys and values, as `SegmentedKV` does.

    Writing waits for the queries, so that the layer is evaluated once.
    """

    def __init__(self, rows: Sequence[ReadRow], keys: mx.array, values: mx.array) -> None:
        self._rows = rows
        self._keys = keys  # [rows, kv_heads, 1, k_dim]
        self._values = values
        self._done: WrittenRows | None = None

    @property
    def launched(self) -> Sequence[mx.array]:
        return ()

    def takes(self, queries: mx.array) -> bool:
        return fits(queries)

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        mx.eval(queries, self._keys, self._values)
        written = self._written()
        # float32 whatever the dtype of the model: numba would compile the kernels anew for another dtype, for seconds.
        columns = _NO_SINKS if sinks is None else np.array(sinks.astype(mx.float32))
        # The loops are compiled for contiguous arrays: only such loops become vector instructions.
        return mx.array(written.attend(np.ascontiguousarray(queries), scale, columns, PARALLEL_ASLEEP))

    def write(self) -> Sequence[DecodeRow]:
        """Write the new tokens; for readers of the rows that take another path."""
        mx.eval(self._keys, self._values)
        self._written()
        return [row.row for row in self._rows]

    def _written(self) -> WrittenRows:
        if self._done is None:
            self._done = _write(self._rows, np.ascontiguousarray(self._keys), np.ascontiguousarray(self._values))
        return self._done


class ReadRow(NamedTuple):
    """A row and the runs of all that it reads beside the buffer that its new token goes to."""

    row: DecodeRow
    runs: list[TokenRun]


def begin_step(rows: Sequence[DecodeRow], keys: mx.array, values: mx.array) -> CpuStep | None:
    """Return the step that writes new tokens [rows, kv_heads, 1, dim]. None: the kernels cannot read all segments."""
    if keys.shape[2] != 1 or not fits(keys, values):
        return None
    found = _read_rows(rows)
    return None if found is None else CpuStep(found, keys, values)


def attend_next(
    rows: Sequence[DecodeRow], q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> np.ndarray | None:
    """Write one new token for each row, as numpy arrays [rows, heads, 1, dim], and attend over it and all before it.
    None: the kernels cannot read all segments."""
    found = _read_rows(rows) if available() else None
    return None if found is None else _write(found, k, v).attend(q, scale, _NO_SINKS, PARALLEL_AWAKE)


def _read_rows(rows: Sequence[DecodeRow]) -> list[ReadRow] | None:
    found = []
    for row in rows:
        runs = []
        for segment in row.segments_before():
            run = run_of(segment)
            if run is None:
                return None
            runs.append(run)
        found.append(ReadRow(row, runs))
    return found


def _write(rows: Sequence[ReadRow], k: np.ndarray, v: np.ndarray) -> WrittenRows:
    from kvstrata.attention.cpu import kernels as cpu_kernels

    by_row = [[*runs, _next_run(row)] for row, runs in rows]
    runs = [run for runs in by_row for run in runs]
    table = np.array([(i, *run.fields()) for i, runs in enumerate(by_row) for run in runs], np.int64)
    cpu_kernels.write(k, v, table)
    return WrittenRows(table, runs, k.shape[1], (k.shape[3], v.shape[3]))


def _next_run(row: DecodeRow) -> TokenRun:
    """Reserve the slot of a row's new token, and return the run of its buffer with that token."""
    slot = row.next_slot()
    row.count_next()
    return TokenRun(*slot.views.get(_slot_addresses, slot), slot.size, slot.at, slot.num_tokens)


def _slot_addresses(slot: KvSlot) -> tuple[int, int]:
    mx.eval(slot.k, slot.v)
    k, v = _address(slot.k, mx.float32), _address(slot.v, mx.float32)
    assert k, "kernels write float32 without gaps"
    assert v, "kernels write float32 without gaps"
    return k, v


class WrittenRows(NamedTuple):
    """Rows whose new tokens are in their buffers."""

    table: np.ndarray  # [runs, 1 + fields of TokenRun], the row first
    runs: list[TokenRun]  # of all rows; they keep the memory of the addresses in the table alive
    kv_heads: int
    dims: tuple[int, int]  # of a key and of a value

    def attend(self, q: np.ndarray, scale: float, sinks: np.ndarray, parallel_from: int) -> np.ndarray:
        """Attend over the written rows. `parallel_from`: other threads help if more numbers than this are read."""
        from kvstrata.attention.cpu import kernels as cpu_kernels

        k_dim, v_dim = self.dims
        out = np.zeros((*q.shape[:3], v_dim), np.float32)
        num_read = self.kv_heads * sum([run.num_tokens for run in self.runs]) * (k_dim + v_dim)
        rotations = (*hadamard_of(k_dim), *hadamard_of(v_dim))
        with threads_for(is_large=num_read > parallel_from):
            cpu_kernels.decode(q, self.kv_heads, self.table, scale, sinks, *rotations, out)
        return out


def run_of(segment: Segment) -> TokenRun | None:
    """Return the run of a segment; None if the kernels cannot read it. A raw one is valid until it is written to."""
    if isinstance(segment, RawSegment):
        k, v = segment.views.get(_raw_addresses, segment)
        holds = (segment.k_buffer, segment.v_buffer)
        size, num_tokens = segment.k_buffer.shape[2], segment.num_tokens
        return TokenRun(k, v, size, NOWHERE, num_tokens, segment.start, holds=holds) if k and v else None
    if isinstance(segment, SegmentSlice):
        return segment.views.get(_slice_run, segment)
    assert isinstance(segment, SealedSegment)
    return segment.views.get(_sealed_run, segment)


def _raw_addresses(segment: RawSegment) -> tuple[int, int]:
    return _address(segment.k_buffer, mx.float32), _address(segment.v_buffer, mx.float32)


def _slice_run(segment: SegmentSlice) -> TokenRun | None:
    whole = run_of(segment.whole)
    return None if whole is None else whole._replace(num_tokens=segment.num_tokens, start=segment.start)


def _sealed_run(segment: SealedSegment) -> TokenRun | None:
    k, v = _sealed(segment.k), _sealed(segment.v)
    if k is None or v is None or v.layout.num_pairs:
        return None
    holds = (*segment.arrays(), *k.holds, *v.holds)
    num_tokens = segment.num_tokens
    return TokenRun(k.address, v.address, num_tokens, NOWHERE, num_tokens, 0, k.layout, v.layout, holds)


class _Sealed(NamedTuple):
    address: int
    layout: ArrayLayout
    holds: tuple[np.ndarray, ...] = ()


def _sealed(encoded: EncodedArray) -> _Sealed | None:
    if isinstance(encoded.codec, RawCodec):
        address = _address(encoded.arrays["values"], mx.float32)
        return _Sealed(address, RAW) if address else None
    if not isinstance(encoded.codec, PlanesCodec):
        return None
    addresses = {name: _address(array) for name, array in encoded.arrays.items()}
    if not all(addresses.values()):
        return None
    ends = np.cumsum(encoded.mean_runs, dtype=np.int64)
    layout = ArrayLayout(
        encoded.codec.bits,
        addresses.get("next", 0),
        addresses.get("low", 0),
        addresses["scales"],
        addresses["means"],
        ends.ctypes.data,
        len(ends),
    )
    rotation = encoded.codec.rotation
    if rotation is None:
        return _Sealed(addresses["top"], layout, (ends,))
    columns = tables(rotation, encoded.dim).columns
    rotated = layout._replace(
        columns_address=columns.ctypes.data,
        offset=encoded.position % GROUP_TOKENS,
        first_dim=rotation.first,
        num_pairs=rotation.num_pairs,
        **dict(zip(("step", "gap"), rotation.strides, strict=True)),
    )
    return _Sealed(addresses["top"], rotated, (ends, columns))


def _address(array: mx.array, dtype: mx.Dtype | None = None) -> int:
    """Return the address of an array; 0 if the kernels cannot read it: another dtype, or gaps."""
    if dtype is not None and array.dtype != dtype:
        return 0
    mx.eval(array)
    view = np.asarray(array)
    return view.ctypes.data if view.flags.c_contiguous else 0


def softmax(scores: mx.array) -> mx.array:
    """Compute the softmax over the last axis. On a CPU it overwrites `scores`, so only the caller may hold them."""
    if not fits(scores):
        return mx.softmax(scores, axis=-1, precise=True)
    mx.eval(scores)
    view = np.asarray(scores)
    if not view.flags.c_contiguous:
        return mx.softmax(scores, axis=-1, precise=True)
    columns = scores.shape[-1]
    _softmax_causal(view.reshape(-1, columns), columns, 1)  # every query sees every column
    return scores


def _softmax_causal(scores: np.ndarray, past: int, tokens: int) -> None:
    from kvstrata.attention.cpu import kernels as cpu_kernels

    # MLX has computed the scores, so our threads are asleep.
    with threads_for(is_large=scores.size > PARALLEL_ASLEEP):
        cpu_kernels.softmax_causal(scores, past, tokens)


def prefill(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Causal attention of one row: q [1, heads, tokens, k_dim] are the last tokens of k [1, kv_heads, total, k_dim]."""
    heads, tokens, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    past = k.shape[2] - tokens
    grouped = (q * scale).reshape(1, kv_heads, heads // kv_heads, tokens, q.shape[3])
    out = []
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        block = grouped[:, :, :, start:end].reshape(1, kv_heads, -1, q.shape[3])
        scores = block @ k[:, :, : past + end].swapaxes(-1, -2)
        mx.eval(scores)
        _softmax_causal(np.asarray(scores).reshape(-1, past + end), past + start, end - start)
        mixed = scores @ v[:, :, : past + end]
        out.append(mixed.reshape(1, heads, end - start, v.shape[3]))
    return mx.concatenate(out, axis=2) if len(out) > 1 else out[0]
