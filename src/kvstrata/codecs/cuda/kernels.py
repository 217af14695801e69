"""The CUDA kernels: their sources put together, one kernel for each name.

A kernel is compiled when it is first run (`compile.py`). Numbers that change from call to call are read from arrays or
from their shapes; numbers with few values (bits, dims) are compiled in, and so are the types of arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from kvstrata.codecs.cuda import compile as cuda_compile

FOLDER = Path(__file__).parent / "source"

# Texts that only attention launches.
ATTENTION_FOLDER = Path(__file__).parents[2] / "attention" / "cuda" / "source"

ATTENTION = ("intrinsics", "codes", "operands", "rope", "queries", "rope_means", "attention")

WARPS = 4  # of a block, as in queries.cuh

ENTRY, ADDRESSES = 8, 12  # numbers in a row of a table, as in step.cuh

Kind = Literal["planes", "raw"]

logger = logging.getLogger(__name__)

_PLANES = ("top", "next", "low", "scales", "means")

# MLX writes the first line of a kernel that it compiles, so launch bounds are added by redefining a word of that line.
_BOUNDS = """
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__({threads}, {blocks})
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
    body = _body("attend_place") + _segments_body(kinds)
    return _make(f"attend_{_letters(kinds)}", attend_inputs(kinds), ("sums", "stats"), body, ATTENTION, views=True)


@cache
def step(blocks: int) -> Kernel:
    """Decode step of a batch, over addresses. A multiprocessor has registers for `blocks` blocks at once."""
    tables = ("places", "pieces", "kinds", "addresses", "counters", "sinks", "facts")
    inputs, outputs = ("q", "k_new", "v_new", *tables), ("out", "sums", "stats")
    kernel = _make(f"step{blocks}", inputs, outputs, _body("step"), (*ATTENTION, "step"))
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
        planes = [f"pieces{i}", *_names(f"k{i}"), *_names(f"v{i}"), f"rotations{i}"]
        names += planes if kind == "planes" else [f"k{i}", f"v{i}"]
    return tuple(names)


def _segments_body(kinds: tuple[Kind, ...]) -> str:
    """Code for attention segments: a block works on one segment, and each of its warps on a piece of it."""
    counts = {"planes": "pieces{i}_shape[0]", "raw": "(k{i}_shape[2] + SIZE{i} - 1) / SIZE{i}"}
    code = {kind: _body(f"attend_{kind}") for kind in kinds}
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
    return _make(
        "score_planes",
        ("q", "k_signs", "rotations", "pieces0", *_names("k")),
        ("scores",),
        _body("score_planes"),
        ATTENTION,
    )


@cache
def mix_planes() -> Kernel:
    return _make("mix_planes", ("p", "v_signs", "pieces0", *_names("v")), ("sums",), _body("mix_planes"), ATTENTION)


@cache
def decode_planes() -> Kernel:
    inputs = ("k_signs", "angles", "starts", *_names("k"))
    return _make("decode_planes", inputs, ("out",), _body("decode_planes"), ("intrinsics", "codes", "rope", "decode"))


@cache
def decode_ranges() -> Kernel:
    inputs = ("signs", "angles", "ranges", "starts", "addresses", "own")
    return _make("decode_ranges", inputs, ("out",), _body("decode_ranges"), ("intrinsics", "codes", "rope", "decode"))


@cache
def encode_planes() -> Kernel:
    files = ("intrinsics", "codes", "rope", "encode")
    return _make("encode_planes", ("x", "signs", "angles", "starts"), _PLANES, _body("encode_planes"), files)


@cache
def combine(num_partials: int) -> Kernel:
    pairs = [(f"sums{i}", f"stats{i}") for i in range(num_partials)]
    partials = ", ".join(f"{{{sums}, {stats}, {sums}_shape[1]}}" for sums, stats in pairs)
    body = f"""
  __shared__ kvstrata::Combining<V_DIM> shared;
  const int num_queries = sums0_shape[2], head = blockIdx.x / num_queries, query = blockIdx.x % num_queries;
  const kvstrata::Partial partials[{num_partials}] = {{{partials}}};
  const float sink = HAS_SINKS ? sinks[blockIdx.x] : -INFINITY;
  kvstrata::combine<T, V_DIM, {num_partials}>(shared, partials, head, query, num_queries, sink, out, log_sum);
"""
    inputs = ("sinks", *(name for pair in pairs for name in pair))
    return _make(f"combine{num_partials}", inputs, ("out", "log_sum"), body, ("intrinsics", "combine"))


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
    return "\n".join(without_comments(_path(file)) for file in files)


@cache
def _body(name: str) -> str:
    """Return the body of a kernel without the comment that begins its file."""
    lines = _path(f"{name}_body").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(dropwhile(lambda line: line.startswith("//"), lines))


def _path(name: str) -> Path:
    path = FOLDER / f"{name}.cuh"
    return path if path.exists() else ATTENTION_FOLDER / path.name
