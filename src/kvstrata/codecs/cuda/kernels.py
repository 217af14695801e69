"""The CUDA kernels: their sources put together, one kernel for each name.

A kernel is compiled when it is first run (`compile.py`). Numbers that change from call to call are read from arrays or
from their shapes; numbers with few values (bits, dims) are compiled in, and so are the types of arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from kvstrata.codecs.cuda import compile as cuda_compile

FOLDER = Path(__file__).parent / "source"

ATTENTION = ("intrinsics", "codes", "shares", "turn", "queries", "turned", "attention")

WARPS = 4  # of a block, as in queries.cuh

ENTRY, ADDRESSES = 8, 12  # numbers in a row of a table, as in step.cuh

Kind = Literal["planes", "raw"]

logger = logging.getLogger(__name__)

_PLANES = ("top", "next", "low", "scales", "means")

# Addresses of a head's planes and of the mean of a mean run.
_SOURCE = """
    const long {x}_row = long(head) * {x}_scales_shape[1];
    const kvstrata::Source {x}_source{{{x}_top + {x}_row * ({dim} / 16), {x}_next + {x}_row * ({dim} / 16),
        {x}_low + {x}_row * ({dim} / 8), {x}_scales + {x}_row,
        {x}_means + (long(head) * {x}_means_shape[1] + {segment}) * {dim}, 0}};
"""

# Blocks: pieces by the warps of a block, heads, queries by tiles.
_PLACE = """
  const kvstrata::Lane lane;
  const int head = blockIdx.y, first_query = blockIdx.z * 4 * TILES;
"""

_QUERIES = """
  const int total_queries = {x}_shape[1], num_queries = min(4 * TILES, total_queries - first_query);
"""

# In this and the next two texts @ is the number of the attention segment. pieces [n, 5]: first token, number of tokens,
# mean run of keys, mean run of values, and offset of the first token in the group that shares a mean. A warp without a
# piece still helps with the queries.
_PIECE = """
    const int piece = block * kvstrata::WARPS + lane.warp;
    const int* place = pieces@ + 5 * min(piece, num_pieces@ - 1);
    const int start = place[0], count = place[1];
"""

_ATTEND_PLANES = f"""{_PIECE}
    {_SOURCE.format(x="k@", dim="K_DIM", segment="place[2]")}{_SOURCE.format(x="v@", dim="V_DIM", segment="place[3]")}
    kvstrata::Keys<K_BITS@, K_DIM> k;
    kvstrata::Values<V_BITS@, V_DIM> v;
    k.load(k@_source, start, start + count - 1, lane);
    v.load(v@_source, start, start + count - 1, lane);
    kvstrata::take_queries(shared.queries, q_row, q_strides[1], *scale, num_queries, lane);
    kvstrata::rotate_queries(shared.rotated, shared.queries, k_signs, num_queries, lane);
    __syncthreads();
    if (piece < num_pieces@) {{
      kvstrata::Asked<false, K_BITS@, K_DIM, TILES> asked;
      asked.take(shared.rotated, num_queries, lane);
      float* found = shared.found.sums[lane.warp];
      // Until the piece is done, what it finds has no need of its memory.
      float* shares = K_PAIRS@ > 0 ? found : nullptr;
      if constexpr (K_PAIRS@ > 0) {{
        using Turn = kvstrata::Turn<K_PAIRS@, K_FIRST@, K_INTERLEAVED@>;
        kvstrata::add_turned(
            Turn{{}}, shared.queries, k@_source.mean, turns@, place[4], num_queries,
            shared.scratch[lane.warp].factors, shares, lane);
      }} else {{
        asked.centre(shared.queries, k@_source.mean, num_queries, lane);
      }}
      kvstrata::attend<false, K_BITS@, V_BITS@, K_DIM, V_DIM, TILES>(
          shared.scratch[lane.warp].exchange, asked, k, v, k@_source, v@_source, shares, start, count,
          num_queries, found, shared.found.stats[lane.warp][0], lane);
      shared.found.says(v@_source.mean, lane);
    }} else {{
      shared.found.nothing(lane);
    }}
"""

# k and v [1, heads, tokens, dim] may be views of longer arrays.
_ATTEND_RAW = """
    const int piece = block * kvstrata::WARPS + lane.warp;
    const int start = min(piece, num_pieces@ - 1) * SIZE@, count = min(SIZE@, k@_shape[2] - start);
    const kvstrata::Source k_source{k@ + head * k@_strides[1], nullptr, nullptr, nullptr, nullptr, k@_strides[2]};
    const kvstrata::Source v_source{v@ + head * v@_strides[1], nullptr, nullptr, nullptr, nullptr, v@_strides[2]};
    kvstrata::Keys<kvstrata::RAW, K_DIM> k;
    kvstrata::Values<kvstrata::RAW, V_DIM> v;
    k.load(k_source, start, start + count - 1, lane);
    v.load(v_source, start, start + count - 1, lane);
    kvstrata::take_queries(shared.queries, q_row, q_strides[1], *scale, num_queries, lane);
    __syncthreads();
    if (piece < num_pieces@) {
      kvstrata::Asked<BF, kvstrata::RAW, K_DIM, TILES> asked;
      asked.take(shared.queries, num_queries, lane);
      kvstrata::attend<BF, kvstrata::RAW, kvstrata::RAW, K_DIM, V_DIM, TILES>(
          shared.scratch[lane.warp].exchange, asked, k, v, k_source, v_source, nullptr, start, count,
          num_queries, shared.found.sums[lane.warp], shared.found.stats[lane.warp][0], lane);
      shared.found.says(nullptr, lane);
    } else {
      shared.found.nothing(lane);
    }
"""

# MLX writes the first line of a kernel that it compiles, so launch bounds are added by redefining a word of that line.
_BOUNDS = """
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__({threads}, {blocks})
"""

# A decode step over addresses: see step.cuh. `facts`: the scale, whether there are sinks, signs of keys and of values.
_STEP = """
  __shared__ kvstrata::Shared<K_DIM, V_DIM, TILES> shared;
  __shared__ bool is_last;
  const kvstrata::Lane lane;
  const int num_heads = k_new_shape[1], num_queries = q_shape[1] / num_heads;
  const int row = blockIdx.y / num_heads, head = blockIdx.y % num_heads;
  const int* place = places + kvstrata::ENTRY * row;
  const int num_known = place[5], num_pieces = num_known + (place[2] + place[3] - 1) / place[3];
  const int num_blocks = (num_pieces + kvstrata::WARPS - 1) / kvstrata::WARPS;
  if (blockIdx.x >= num_blocks) return;
  const int piece = blockIdx.x * kvstrata::WARPS + lane.warp;
  // A warp that has no piece still helps with the queries.
  const bool has_piece = piece < num_pieces;
  const int mine = has_piece ? piece : num_pieces - 1;
  const kvstrata::Work work = kvstrata::work_of<K_DIM, V_DIM>(
      place, pieces + kvstrata::ENTRY * (place[4] + mine), mine - num_known, kinds,
      reinterpret_cast<const unsigned long long*>(addresses), head);
  const bool has_coded_keys = has_piece && work.k_bits != kvstrata::RAW;
  if (has_piece && mine >= num_known && place[1] >= work.start && place[1] < work.start + work.count) {
    kvstrata::put_token<K_DIM>(work.k, place[1], k_new + long(blockIdx.y) * K_DIM, lane);
    kvstrata::put_token<V_DIM>(work.v, place[1], v_new + long(blockIdx.y) * V_DIM, lane);
    __syncwarp();
  }
  const auto* asked = q + long(blockIdx.y) * num_queries * K_DIM;
  kvstrata::take_queries(shared.queries, asked, K_DIM, facts[0], num_queries, lane);
  if (__syncthreads_or(has_coded_keys)) {
    kvstrata::rotate_queries(shared.rotated, shared.queries, facts + 2, num_queries, lane);
    __syncthreads();
  }
  float* shares = nullptr;
  if (has_coded_keys && work.turn.pairs > 0) {
    // Until the piece is done, what it finds has no need of its memory.
    shares = shared.found.sums[lane.warp];
    kvstrata::add_turned(
        work.turn, shared.queries, work.k.mean, work.table, work.offset, num_queries,
        shared.scratch[lane.warp].factors, shares, lane);
  }
  if (!has_piece) {
    shared.found.nothing(lane);
  } else if (work.k_bits == kvstrata::RAW) {
    kvstrata::attend_values<BF, kvstrata::RAW, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, lane);
  } else if (work.k_bits == 8) {
    kvstrata::attend_values<BF, 8, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, lane);
  } else if (work.k_bits == 4) {
    kvstrata::attend_values<BF, 4, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, lane);
  } else {
    kvstrata::attend_values<BF, 2, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, lane);
  }
  const long first = long(blockIdx.y) * gridDim.x * num_queries, found = first + blockIdx.x * num_queries;
  if (has_piece) shared.found.says(work.v.mean, lane);
  shared.found.merge(num_queries, facts + 2 + K_DIM, sums + found * V_DIM, stats + 2 * found);
  __threadfence();
  __syncthreads();
  unsigned* counter = const_cast<unsigned*>(counters) + blockIdx.y;
  if (threadIdx.x == 0) is_last = atomicAdd(counter, 1u) + 1 == num_blocks;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  kvstrata::combine_found(
      shared.found, sums + first * V_DIM, stats + 2 * first, num_blocks, num_queries,
      facts[1] != 0 ? sinks + head * num_queries : nullptr, out + long(blockIdx.y) * num_queries * V_DIM);
"""

_SCORE = f"""{_PLACE}{_QUERIES.format(x="q")}
  __shared__ kvstrata::Queries<K_DIM, TILES> queries, rotated;
  const int block = blockIdx.x, num_pieces0 = pieces0_shape[0];
  {_PIECE.replace("@", "0")}{_SOURCE.format(x="k", dim="K_DIM", segment="place[2]")}
  const long row = long(head) * total_queries + first_query;
  kvstrata::take_queries(queries, q + row * K_DIM, K_DIM, 1.0f, num_queries, lane);
  kvstrata::rotate_queries(rotated, queries, k_signs, num_queries, lane);
  __syncthreads();
  if (piece >= num_pieces0) return;
  kvstrata::Asked<false, K_BITS, K_DIM, TILES> asked;
  asked.take(rotated, num_queries, lane);
  float* shares = nullptr;
  if constexpr (K_PAIRS > 0) {{
    __shared__ float turned[kvstrata::WARPS][4 * TILES * kvstrata::SHARES];
    __shared__ kvstrata::Factors<K_DIM, TILES> factors[kvstrata::WARPS];
    shares = turned[lane.warp];
    using Turn = kvstrata::Turn<K_PAIRS, K_FIRST, K_INTERLEAVED>;
    kvstrata::add_turned(
        Turn{{}}, queries, k_source.mean, turns, place[4], num_queries, factors[lane.warp], shares, lane);
  }} else {{
    asked.centre(queries, k_source.mean, num_queries, lane);
  }}
  const long num_tokens = k_scales_shape[1];
  kvstrata::score(asked, k_source, shares, start, count, num_queries, scores + row * num_tokens, num_tokens, lane);
"""

_MIX = f"""{_PLACE}{_QUERIES.format(x="p")}
  const int block = blockIdx.x, num_pieces0 = pieces0_shape[0];
  {_PIECE.replace("@", "0")}{_SOURCE.format(x="v", dim="V_DIM", segment="place[3]")}
  if (piece >= num_pieces0) return;
  const long num_tokens = v_scales_shape[1];
  const float* weights = p + (long(head) * total_queries + first_query) * num_tokens;
  float* out = sums + ((long(head) * num_pieces0 + piece) * total_queries + first_query) * V_DIM;
  kvstrata::mix<V_BITS, V_DIM, TILES>(
      v_source, weights, num_tokens, v_signs, start, count, num_queries, out, lane);
"""

# starts: first token and number of tokens to decode, offset of token 0 in its group, bits; then the first token of each
# mean run, and the end.
_DECODE = """
  using Turn = kvstrata::Turn<PAIRS, FIRST, INTERLEAVED>;
  const int num_tokens = k_scales_shape[1], num_segments = k_means_shape[1], start = starts[0], count = starts[1];
  const long num_units = long(k_scales_shape[0]) * count * (DIM / 16);
  kvstrata::decode<Turn, T, DIM>(
      starts[3], k_top, k_next, k_low, k_scales, k_means, k_signs, angles, starts[2], starts + 4, num_segments,
      long(blockIdx.x) * blockDim.x + threadIdx.x, num_units, num_tokens, start, count, out);
"""

# spans: the number of tokens and of attention segments in the first row, then as in decode.cuh. PLACE: place of keys or
# of values in a row of addresses.
_DECODE_PARTS = """
  using Turn = kvstrata::Turn<PAIRS, FIRST, INTERLEAVED>;
  const int total = spans[0];
  kvstrata::decode_parts<Turn, T, DIM>(
      spans + 8, spans[1], starts, reinterpret_cast<const unsigned long long*>(addresses) + PLACE, own, signs, angles,
      long(blockIdx.x) * blockDim.x + threadIdx.x, long(own_shape[1]) * total * (DIM / 16), total, out);
"""

# Blocks: mean runs, heads.
_ENCODE = """
  __shared__ float sums[kvstrata::ENCODE_THREADS];
  __shared__ float mean[DIM];
  using Turn = kvstrata::Turn<PAIRS, FIRST, INTERLEAVED>;
  const int num_tokens = x_shape[1], num_segments = starts_shape[0] - 5, head = blockIdx.y, offset = starts[2];
  const int start = starts[4 + blockIdx.x], end = starts[5 + blockIdx.x];
  const long row = long(head) * num_tokens;
  kvstrata::mean_of<Turn, DIM>(
      x + row * DIM, angles, offset, start, end, sums, mean, means + (long(head) * num_segments + blockIdx.x) * DIM);
  kvstrata::encode<Turn, BITS, DIM>(
      x + row * DIM, mean, signs, angles, offset, start, end, top + row * (DIM / 16),
      next + (BITS >= 4 ? row * (DIM / 16) : 0), low + (BITS == 8 ? row * (DIM / 8) : 0), scales + row);
"""

Constant = tuple[str, mx.Dtype | int]  # or a bool, which is an int

Run = Callable[..., list[mx.array]]  # takes the arguments of MLX's kernels


@dataclass(frozen=True, eq=False)
class Kernel:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    header: str
    views: bool  # inputs may be views of larger arrays
    _ready: dict[tuple[Constant, ...], Run] = field(default_factory=dict, init=False, repr=False)

    def run(self, constants: tuple[Constant, ...], inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
        """Run the kernel; `launch` has arguments of MLX's kernels. `constants` determine the types of all arrays but
        those whose address alone is used. MLX's own templates would cost regular expressions at each call."""
        run = self._ready.get(constants)
        if run is None:
            dtypes = [array.dtype for array in inputs], launch["output_dtypes"]
            run = self._ready[constants] = self._compiled(constants, *dtypes)
        return run(inputs=inputs, **launch)

    def source(self, constants: tuple[Constant, ...]) -> str:
        return "".join(_declared(*constant) for constant in constants) + self.body

    @property
    def needs_strides(self) -> bool:
        """Whether the kernel reads strides, which MLX passes only to kernels that it compiles itself."""
        return "_strides" in self.body

    def text(
        self, constants: tuple[Constant, ...], inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]
    ) -> cuda_compile.CudaText:
        """Return the kernel's text for arrays of these types."""
        arrays = [
            [cuda_compile.ArrayArgument(*array) for array in zip(names, dtypes, strict=True)]
            for names, dtypes in ((self.inputs, inputs), (self.outputs, outputs))
        ]
        return cuda_compile.text_of(self.name, self.header, self.source(constants), *arrays)

    def _compiled(
        self, constants: tuple[Constant, ...], inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]
    ) -> Run:
        text = self.text(constants, inputs, outputs)
        if not self.needs_strides and cuda_compile.works(_read_all(("intrinsics",))):
            try:
                return cuda_compile.Compiled(text, views=self.views)
            except RuntimeError as failure:
                logger.warning("Kernel %s is left to MLX, which compiles it at every start: %s", self.name, failure)
        run: Any = mx.fast.cuda_kernel(
            name=text.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=self.source(constants),
            header=self.header,
            ensure_row_contiguous=not self.views,
        )
        return run


def _declared(name: str, value: mx.Dtype | int) -> str:
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {cuda_compile.TYPES[value]};\n"
    return f"  constexpr {type(value).__name__} {name} = {str(value).lower()};\n"


@cache
def attend(kinds: tuple[Kind, ...]) -> Kernel:
    """Attention over several segments in one launch; `combine` merges the results of the blocks."""
    body = _PLACE + _QUERIES.format(x="q") + _parts(kinds)
    return _make(f"attend_{_letters(kinds)}", attend_inputs(kinds), ("sums", "stats"), body, ATTENTION, views=True)


@cache
def step(blocks: int) -> Kernel:
    """Decode step of a batch, over addresses. A multiprocessor has registers for `blocks` blocks at once."""
    tables = ("places", "pieces", "kinds", "addresses", "counters", "sinks", "facts")
    inputs, outputs = ("q", "k_new", "v_new", *tables), ("out", "sums", "stats")
    kernel = _make(f"step{blocks}", inputs, outputs, _STEP, (*ATTENTION, "step"))
    return replace(kernel, header=kernel.header + _BOUNDS.format(threads=32 * WARPS, blocks=blocks))


@cache
def addresses(places: tuple[int, ...]) -> Kernel:
    """Kernel that writes a row of addresses: each input's at its place, 0 at the others. Inputs are not copied first: a
    copy would be freed before a kernel reads it."""
    inputs = tuple(f"array{i}" for i in range(len(places)))
    at = dict(zip(places, inputs, strict=True))
    lines = [f"  out[{i}] = {f'(unsigned long long){at[i]}' if i in at else 0};" for i in range(ADDRESSES)]
    name = "addresses_" + "_".join(map(str, places))
    return _make(name, inputs, ("out",), "\n".join(lines), ("intrinsics",), views=True)


@cache
def collect(num_rows: int) -> Kernel:
    """Kernel that collects rows of addresses, then repeats the last row: separate copies would cost a launch each."""
    inputs = tuple(f"row{i}" for i in range(num_rows))
    pointers = ", ".join(f"(const unsigned long long*){name}" for name in inputs)
    body = f"""
  const unsigned long long* rows[] = {{{pointers}}};
  out[blockIdx.y * {ADDRESSES} + threadIdx.x] = rows[min(int(blockIdx.y), {num_rows - 1})][threadIdx.x];
"""
    return _make(f"collect{num_rows}", inputs, ("out",), body, ("intrinsics",))


def attend_inputs(kinds: tuple[Kind, ...]) -> tuple[str, ...]:
    names = ["q", "scale", "k_signs", "v_signs"]
    for i, kind in enumerate(kinds):
        planes = [f"pieces{i}", *_names(f"k{i}"), *_names(f"v{i}"), f"turns{i}"]
        names += planes if kind == "planes" else [f"k{i}", f"v{i}"]
    return tuple(names)


def _parts(kinds: tuple[Kind, ...]) -> str:
    """Code for attention segments: a block works on one segment, and each of its warps on a piece of it."""
    counts = {"planes": "pieces{i}_shape[0]", "raw": "(k{i}_shape[2] + SIZE{i} - 1) / SIZE{i}"}
    code = {"planes": _ATTEND_PLANES, "raw": _ATTEND_RAW}
    body = """
  __shared__ kvstrata::Shared<K_DIM, V_DIM, TILES> shared;
  const auto* q_row = q + blockIdx.y * q_strides[0] + first_query * q_strides[1];
  int block = blockIdx.x, num_blocks = 0;
"""
    for i, kind in enumerate(kinds):
        body += f"""
  const int num_pieces{i} = {counts[kind].format(i=i)};
  const int num_blocks{i} = (num_pieces{i} + kvstrata::WARPS - 1) / kvstrata::WARPS;
  num_blocks += num_blocks{i};
"""
    body += "  if (block >= num_blocks) return;\n"
    for i, kind in enumerate(kinds):
        body += f"""
  if (block >= 0 && block < num_blocks{i}) {{{code[kind].replace("@", str(i))}
  }}
  block -= num_blocks{i};
"""
    return f"""{body}
  const long place = (long(blockIdx.y) * gridDim.x + blockIdx.x) * total_queries + first_query;
  shared.found.merge(num_queries, v_signs, sums + place * V_DIM, stats + 2 * place);
"""


def _letters(kinds: tuple[Kind, ...]) -> str:
    return "".join(kind[0] for kind in kinds)


@cache
def score_planes() -> Kernel:
    return _make("score_planes", ("q", "k_signs", "turns", "pieces0", *_names("k")), ("scores",), _SCORE, ATTENTION)


@cache
def mix_planes() -> Kernel:
    return _make("mix_planes", ("p", "v_signs", "pieces0", *_names("v")), ("sums",), _MIX, ATTENTION)


@cache
def decode_planes() -> Kernel:
    inputs = ("k_signs", "angles", "starts", *_names("k"))
    return _make("decode_planes", inputs, ("out",), _DECODE, ("intrinsics", "codes", "turn", "decode"))


@cache
def decode_parts() -> Kernel:
    inputs = ("signs", "angles", "spans", "starts", "addresses", "own")
    return _make("decode_parts", inputs, ("out",), _DECODE_PARTS, ("intrinsics", "codes", "turn", "decode"))


@cache
def encode_planes() -> Kernel:
    files = ("intrinsics", "codes", "turn", "encode")
    return _make("encode_planes", ("x", "signs", "angles", "starts"), _PLANES, _ENCODE, files)


@cache
def combine(num_parts: int) -> Kernel:
    pairs = [(f"sums{i}", f"stats{i}") for i in range(num_parts)]
    parts = ", ".join(f"{{{sums}, {stats}, {sums}_shape[1]}}" for sums, stats in pairs)
    body = f"""
  __shared__ kvstrata::Combining<V_DIM> shared;
  const int num_queries = sums0_shape[2], head = blockIdx.x / num_queries, query = blockIdx.x % num_queries;
  const kvstrata::Partial parts[{num_parts}] = {{{parts}}};
  const float sink = HAS_SINKS ? sinks[blockIdx.x] : -INFINITY;
  kvstrata::combine<T, V_DIM, {num_parts}>(shared, parts, head, query, num_queries, sink, out, log_sum);
"""
    inputs = ("sinks", *(name for pair in pairs for name in pair))
    return _make(f"combine{num_parts}", inputs, ("out", "log_sum"), body, ("intrinsics", "combine"))


def without_comments(file: Path) -> str:
    """Return a source without comments: MLX copies the source of a kernel that it compiles at every call."""
    lines = file.read_text(encoding="utf-8").splitlines()
    code = (line.partition("//")[0].strip() for line in lines)
    return "\n".join(line for line in code if line)


def _names(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{name}" for name in _PLANES)


def _make(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: str,
    files: tuple[str, ...],
    *,
    views: bool = False,
) -> Kernel:
    return Kernel(name, inputs, outputs, body, _read_all(files), views)


@cache
def _read_all(files: tuple[str, ...]) -> str:
    return "\n".join(without_comments(FOLDER / f"{file}.cuh") for file in files)
