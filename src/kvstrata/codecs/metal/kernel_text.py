"""Texts of the portable kernels, written once for three dialects: Metal, CUDA and plain C++.

Servers run the portable kernels on Metal only; the CUDA and C++ dialects exist for tests.

`source/` has the bodies, in the common subset of the three languages, and a prelude for each language. This module puts
both together for given sizes. It knows no contents of arrays, no attention segments and no tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx

FOLDER = Path(__file__).parent / "source"

LANES = 32  # of a threadgroup

MOST_TILE = 4  # queries that share the KV that is read; more would exceed the registers

LARGEST_DIM = 256

Dialect = Literal["metal", "cuda", "plain"]

# Numbers of raw dtypes in the kernels.
RAW_KINDS = {mx.float32: 32, mx.float16: 16, mx.bfloat16: 17}

_RAW_BITS = {mx.float32: 1, mx.float16: 2, mx.bfloat16: 4}

_TYPES: dict[Dialect, dict[mx.Dtype, str]] = {
    "metal": {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"},
    "cuda": {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"},
    "plain": {mx.float32: "float", mx.float16: "kv_half", mx.bfloat16: "kv_bfloat"},
}

_CODES = {8: ("top", "next", "low"), 4: ("top", "next"), 2: ("top",)}

# MLX searches the text of a kernel for the names of Metal's indices, and passes each index that it finds.
_PLACES: dict[Dialect, str] = {
    "metal": """  const int kv_lane = int(thread_index_in_simdgroup);
  const uint3 kv_groups = threadgroup_position_in_grid;
#define KV_LANE kv_lane
#define KV_GROUP_X int(kv_groups.x)
#define KV_GROUP_Y int(kv_groups.y)
#define KV_GROUP_Z int(kv_groups.z)
""",
    "cuda": "",
    "plain": "",
}


class ArrayCounts(NamedTuple):
    """Number of arrays that a launch takes of each kind: words of codes, float16 numbers, raw vectors."""

    words: int
    halves: int
    raw: int

    def holds(self, other: ArrayCounts) -> bool:
        return self.words >= other.words and self.halves >= other.halves and self.raw >= other.raw

    @property
    def names(self) -> list[str]:
        return [f"kv_{letter}{i}" for letter, count in zip("whr", self, strict=True) for i in range(count)]


class HeadSizes(NamedTuple):
    """Sizes that are compiled in."""

    k_dim: int
    v_dim: int
    group: int  # queries of a KV head

    @property
    def num_tiles(self) -> int:
        return -(-self.group // MOST_TILE)

    @property
    def tile(self) -> int:
        return -(-self.group // self.num_tiles)


@dataclass(frozen=True)
class KernelText:
    dialect: Dialect
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str

    @property
    def digest(self) -> str:
        return hashlib.blake2s((self.header + self.body).encode(), digest_size=6).hexdigest()


@cache
def attend_text(dialect: Dialect, sizes: HeadSizes, slots: ArrayCounts, raw: tuple[mx.Dtype, ...]) -> KernelText:
    """Text of the kernel for partial results of attention. `raw`: the dtypes of vectors that are not codes."""
    constants = {
        "KV_K_DIM": sizes.k_dim,
        "KV_V_DIM": sizes.v_dim,
        "KV_GROUP": sizes.group,
        "KV_TILE": sizes.tile,
        "KV_CODED": int(slots.words > 0),
        "KV_RAW_KINDS": sum({_RAW_BITS[dtype] for dtype in raw}),
    }
    header = _header(dialect, constants) + _read("vectors") + _read("attend")
    body = _PLACES[dialect] + _picks(slots) + _read("attend_body")
    inputs = ("q", "table", "angles", *slots.names)
    return KernelText(dialect, "attend_segments", inputs, ("partial",), header, body)


@cache
def combine_text(
    dialect: Dialect, v_dim: int, dtype: mx.Dtype, num_partials: int, sinks: mx.Dtype | None = None
) -> KernelText:
    names = [f"kv_p{i}" for i in range(num_partials)]
    constants = {
        "KV_V_DIM": v_dim,
        "KV_PARTIALS": num_partials,
        "KV_HAS_SINKS": int(sinks is not None),
        "KV_SINK(head)": "float(sinks[head])" if sinks is not None else "(-1.0e30f)",
        "KV_OUT(x)": f"{_TYPES[dialect][dtype]}(x)",
        "KV_EACH_PARTIAL(what)": " ".join(f"what({i}, {name})" for i, name in enumerate(names)),
    }
    header = _header(dialect, constants) + _read("vectors")
    inputs = ("ranges", *(("sinks",) if sinks is not None else ()), *names)
    return KernelText(dialect, "combine_partials", inputs, ("out",), header, _PLACES[dialect] + _read("combine_body"))


@cache
def mean_text(dialect: Dialect, dim: int) -> KernelText:
    """Text of the kernel for the means of mean runs, float16."""
    header = _planes_header(dialect, {"KV_DIM": dim})
    inputs, body = ("table", "angles", "x"), _PLACES[dialect] + _read("mean_body")
    return KernelText(dialect, "means_of_planes", inputs, ("means",), header, body)


@cache
def encode_text(dialect: Dialect, dim: int, bits: int) -> KernelText:
    """Text of the kernel for codes and scales of vectors, given the means."""
    header = _planes_header(dialect, {"KV_DIM": dim, "KV_BITS": bits})
    inputs, outputs = ("table", "angles", "x", "means"), (*_CODES[bits], "scales")
    return KernelText(dialect, "encode_planes", inputs, outputs, header, _PLACES[dialect] + _read("encode_body"))


@cache
def decode_text(dialect: Dialect, dim: int, slots: ArrayCounts, dtype: mx.Dtype) -> KernelText:
    """Text of the kernel that decodes one or several ranges to one array. Raw ranges have the array's dtype."""
    constants = {"KV_DIM": dim, "KV_RAW_KIND": RAW_KINDS[dtype]}
    body = _PLACES[dialect] + _picks(slots) + _read("decode_body")
    inputs = ("table", "angles", *slots.names)
    return KernelText(dialect, "decode_ranges", inputs, ("out",), _planes_header(dialect, constants), body)


def _planes_header(dialect: Dialect, constants: Mapping[str, object]) -> str:
    return _header(dialect, constants) + _read("vectors") + _read("planes")


class KernelLaunch(NamedTuple):
    text: KernelText
    inputs: list[mx.array]
    groups: tuple[int, int, int]
    shapes: list[tuple[int, ...]]  # of the outputs
    dtypes: list[mx.Dtype]


Run = Callable[[KernelLaunch], Sequence[mx.array]]


def run_on_gpu(launch: KernelLaunch) -> Sequence[mx.array]:
    x, y, z = launch.groups
    types = tuple([array.dtype for array in launch.inputs]), tuple(launch.dtypes)
    return _compiled(launch.text, types)(
        inputs=launch.inputs,
        grid=(x * LANES, y, z),
        threadgroup=(LANES, 1, 1),
        output_shapes=launch.shapes,
        output_dtypes=launch.dtypes,
    )


@cache
def _compiled(text: KernelText, dtypes: tuple[tuple[mx.Dtype, ...], ...]) -> Callable[..., Sequence[mx.array]]:
    """Make a kernel. MLX compiles it at its first run and caches it by name, which must include the arrays' types."""
    make: Any = mx.fast.metal_kernel if text.dialect == "metal" else mx.fast.cuda_kernel
    types = hashlib.blake2s(repr(dtypes).encode(), digest_size=4).hexdigest()
    return make(
        name=f"kvstrata_{text.name}_{text.digest}_{types}",
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        source=text.body,
        header=text.header,
    )


def _header(dialect: Dialect, constants: Mapping[str, object]) -> str:
    defines = "".join(f"#undef {_word(name)}\n#define {name} {value}\n" for name, value in constants.items())
    return _read(dialect) + defines


def _word(name: str) -> str:
    return name.partition("(")[0]


def _picks(slots: ArrayCounts) -> str:
    """Return the macros that select an array of each kind by its number."""
    names = {letter: [name for name in slots.names if name[3] == letter] for letter in "whr"}
    return (
        _pick("KV_WORDS", "kv_uint", names["w"])
        + _pick("KV_HALVES", "kv_half", names["h"])
        + _pick("KV_RAW", "kv_uint", names["r"])
    )


def _pick(macro: str, type_name: str, names: Sequence[str]) -> str:
    """Return the macro from slot numbers to addresses: a table of addresses would not stay in registers."""
    pointer = f"(const KV_DEVICE {type_name}*)"
    first, *others = names or ["table"]  # never read where there are no names
    chain = "".join(f"(i) == {number} ? {pointer}{name} : " for number, name in enumerate(others, 1))
    return f"#define {macro}(i) ({chain}{pointer}{first})\n"


@cache
def _read(name: str) -> str:
    return (FOLDER / f"{name}.h").read_text()
