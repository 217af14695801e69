"""The portable attention kernel on a GPU with CUDA: right, and how fast beside the kernels that CUDA has of its own.

    python -m tests.gpu.portable [--only right|speed] [--json FILE]

Right: against float64 in numpy over what the codecs decode. Speed: microseconds of one layer's attention for one token
of each row, many calls in one evaluation over more memory than the GPU's cache holds, and the share of what a plain
copy moves.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np

from kvstrata.attention.dispatch import decode_row_by_row
from kvstrata.attention.metal import decode as metal_decode
from kvstrata.attention.metal import launch_plan as metal_launch_plan
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentedKV, SegmentSlice
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda import planes as cuda_planes
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.planes import TokenRange
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.rope import RopeRotation, make_rotation

ALLOWED = {mx.float32: 1e-3, mx.float16: 2e-3, mx.bfloat16: 1.2e-2}
CACHE_BYTES = 120 << 20  # twice what the GPU's cache holds
ROUNDS = 7
SCALE = 0.1

GROUPS = (1024, 2048, 4096)

Rows = tuple[tuple[Segment, ...], ...]
Work = Callable[[], mx.array | list[mx.array]]


@dataclass(frozen=True)
class Right:
    case: str
    error: float
    allowed: float
    first_s: float  # compiling included

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Speed:
    case: str
    path: str
    microseconds: float
    gigabytes_s: float
    share: float  # of a copy's


def normal(shape: tuple[int, ...], seed: int, dtype: mx.Dtype, offset: float = 0.0) -> mx.array:
    x = (mx.random.normal(shape, key=mx.random.key(seed)) + offset).astype(dtype)
    mx.eval(x)
    return x


def some_rotation(dim: int) -> RopeRotation:
    return make_rotation(10_000.0 ** (-np.arange(dim // 2) / (dim // 2)))


def sealed(k_bits: int, v_bits: int, heads: int, tokens: int, dims: tuple[int, int], seed: int = 0) -> SealedSegment:
    rotation = some_rotation(dims[0]) if seed % 2 == 0 else None
    k = PlanesCodec(k_bits, rotation).encode(normal((heads, tokens, dims[0]), seed, mx.float32, 1.0), 7 * seed)
    v = PlanesCodec(v_bits).encode(normal((heads, tokens, dims[1]), seed + 1, mx.float32), 7 * seed)
    return SealedSegment(k, v)


def raw(heads: int, tokens: int, dims: tuple[int, int], dtype: mx.Dtype, seed: int = 0) -> RawSegment:
    """Long buffers as MLX's own attention likes them, short ones with more around the tokens that are read."""
    start = 0 if tokens % 256 == 0 else 2
    k, v = (normal((1, heads, tokens + 2 * start, dim), seed + i, dtype) for i, dim in enumerate(dims))
    return RawSegment(k, v, tokens, start)


def ours(q: mx.array, rows: Rows, sinks: mx.array | None = None) -> mx.array:
    step = metal_decode.step_of(
        q, [[metal_decode.read_of(part) for part in parts] for parts in rows], SCALE, sinks, "cuda"
    )
    assert step is not None
    return metal_decode.attend(q, step, sinks)


def expected(q: mx.array, rows: Rows, sinks: mx.array | None) -> np.ndarray:
    out = []
    for row, parts in enumerate(rows):
        dense = [part.dense(mx.float32) for part in parts]
        k, v = (np.concatenate([wide(pair[i])[0] for pair in dense], axis=1) for i in range(2))
        grouped = wide(q)[row].reshape(k.shape[0], -1, k.shape[2]) * SCALE
        scores = grouped @ k.swapaxes(-1, -2)
        if sinks is not None:
            scores = np.concatenate([scores, wide(sinks).reshape(k.shape[0], -1, 1)], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out.append((weights[..., : k.shape[1]] @ v).reshape(q.shape[1], 1, -1))
    return np.stack(out)


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def right() -> Iterator[Right]:
    for dtype, dims, group, with_sinks in (
        (mx.bfloat16, (128, 128), 2, False),
        (mx.bfloat16, (64, 64), 7, True),
        (mx.float16, (256, 256), 4, False),
        (mx.float32, (80, 80), 1, True),
        (mx.bfloat16, (192, 128), 3, False),
    ):
        heads = 2
        rows: Rows = (
            (raw(heads, 300, dims, dtype, 1),),
            (sealed(8, 8, heads, 700, dims), raw(heads, 20, dims, dtype, 3)),
            (sealed(4, 2, heads, 500, dims, 1), SegmentSlice(sealed(2, 8, heads, 900, dims, 2), 30, 700)),
            (sealed(8, 4, heads, 270, dims, 3), raw(heads, 1, dims, dtype, 5), raw(heads, 33, dims, dtype, 7)),
        )
        q = normal((len(rows), heads * group, 1, dims[0]), 9, dtype)
        sinks = normal((heads * group,), 8, dtype) if with_sinks else None
        case = f"{dtype}, heads {dims}, {group} queries, sinks {with_sinks}"
        began_s = time.perf_counter()
        try:
            found = ours(q, rows, sinks)
            mx.eval(found)
        except (RuntimeError, ValueError) as failure:
            # The other cases have something to tell as well.
            yield Right(f"{case}: {failure}"[:3000], float("inf"), ALLOWED[dtype], time.perf_counter() - began_s)
            continue
        first_s = time.perf_counter() - began_s
        wanted = expected(q, rows, sinks)
        error = float(np.abs(wide(found) - wanted).max() / np.abs(wanted).max())
        yield Right(case, error, ALLOWED[dtype], first_s)


def codecs_right() -> Iterator[Right]:
    """Beside CUDA's own kernels, which round in another order: here and there a code is its neighbour."""
    for dtype, dim, bits in ((mx.bfloat16, 128, 8), (mx.float16, 192, 4), (mx.float32, 64, 2)):
        for rotation in (some_rotation(dim), None):
            codec = PlanesCodec(bits, rotation)
            x = normal((2, 700, dim), 1, dtype, 1.0)
            began_s = time.perf_counter()
            arrays = metal_planes.encode(x, bits, 100, rotation, "cuda")
            theirs = codec.encode(x, 100)
            planes = EncodedArray(codec, arrays, 700, 100, dim, theirs.mean_runs)
            found, wanted = (wide(codec.decode(each, mx.float32)) for each in (planes, theirs))
            first_s = time.perf_counter() - began_s
            name = f"{codec.name}, heads of {dim}, {dtype}, {'RoPE-aware' if rotation else 'plain'} means"
            yield Right(f"encode {name}", float(np.abs(found - wanted).mean() / np.abs(wanted).mean()), 5e-3, first_s)
            began_s = time.perf_counter()
            decoded = wide(metal_planes.decode(theirs, mx.float32, "cuda"))
            first_s = time.perf_counter() - began_s
            yield Right(f"decode {name}", float(np.abs(decoded - wanted).max() / np.abs(wanted).max()), 1e-4, first_s)
            began_s = time.perf_counter()
            own = normal((2, 90, dim), 2, mx.float32)
            stretches = [TokenRange(theirs, 40, 650), TokenRange(theirs, 0, 700), TokenRange(own, 3, 80)]
            joined = wide(metal_planes.join(stretches, mx.float32, "cuda"))
            first_s = time.perf_counter() - began_s
            whole = np.concatenate([wanted[:, 40:650], wanted, wide(own)[:, 3:80]], axis=1)
            yield Right(f"join {name}", float(np.abs(joined - whole).max() / np.abs(whole).max()), 1e-4, first_s)


def codecs_speed(copy: float) -> Iterator[Speed]:
    x = normal((8, 32768, 128), 1, mx.bfloat16)
    for bits in (8, 4):
        codec = PlanesCodec(bits, some_rotation(128))
        planes = codec.encode(x)
        works: dict[str, list[Work]] = {
            "decode": [
                lambda codec=codec, planes=planes: codec.decode(planes, mx.bfloat16),
                lambda planes=planes: metal_planes.decode(planes, mx.bfloat16, "cuda"),
            ],
            "encode": [
                lambda codec=codec, bits=bits: list(cuda_planes.encode_planes(x, bits, 0, codec.rotation).values()),
                lambda codec=codec, bits=bits: list(metal_planes.encode(x, bits, 0, codec.rotation, "cuda").values()),
            ],
        }
        for what, both in works.items():
            for path, seconds in zip(("CUDA's own", "portable"), timed(both, 4), strict=True):
                rate = (x.nbytes + planes.nbytes) / seconds
                yield Speed(f"{what} planes:{bits}, 32768 x 8", path, 1e6 * seconds, rate / 1e9, rate / copy)


def copy_rate() -> float:
    """Bytes a second, read and written."""
    x = mx.zeros((256 << 20,), mx.uint32)
    mx.eval(x)
    seconds = timed([lambda: x + 1], 4)[0]
    return 2 * x.nbytes / seconds


def timed(works: Sequence[Work], repeats: int) -> list[float]:
    """Seconds of each, in turns; the median of rounds. Graphs are built before the clock starts."""
    found: list[list[float]] = [[] for _ in works]
    for number in range(1 + ROUNDS):
        for i, work in enumerate(works):
            graph = [work() for _ in range(repeats)]
            mx.synchronize()
            began_s = time.perf_counter()
            mx.eval(graph)
            mx.synchronize()
            if number:
                found[i].append((time.perf_counter() - began_s) / repeats)
    return [median(each) for each in found]


def cases(group: int) -> Iterator[tuple[str, list[Rows]]]:
    """Of each as many copies as exceed the cache."""
    dims, dtype = (128, 128), mx.bfloat16
    for tokens, heads in ((4096, 8), (32768, 8), (131072, 8), (32768, 64)):
        for name in ("raw", "planes:8", "planes:4", "planes:4 plain means"):
            made: list[Rows] = []
            while not made or (len(made) < 32 and len(made) * stored(made[0]) < CACHE_BYTES):
                seed = 1 if "plain" in name else 0
                bits = int(name.split(":")[1][0]) if ":" in name else 0
                part = sealed(bits, bits, heads, tokens, dims, seed) if bits else raw(heads, tokens, dims, dtype)
                made.append(((part,),))
            yield f"{name}, {tokens} x {heads}, {group} queries", made
    for name, bits in (("raw", 0), ("planes:8", 8), ("planes:4", 4)):
        rows: Rows = tuple(
            (sealed(bits, bits, 8, 4096, dims, 2 * i), raw(8, 40, dims, dtype))
            if bits
            else (raw(8, 4096, dims, dtype),)
            for i in range(8)
        )
        yield f"8 rows, {name}, 4096 x 8, {group} queries", [rows]


def stored(rows: Rows) -> int:
    total = 0
    for part in (part for parts in rows for part in parts):
        total += part.k.nbytes + part.v.nbytes if isinstance(part, RawSegment) else part.nbytes  # pyright: ignore
    return total


def speed(group: int) -> Iterator[Speed]:
    copy = copy_rate()
    yield Speed("copy of 1 GiB", "MLX", 0.0, copy / 1e9, 1.0)
    yield from codecs_speed(copy)
    for case, made in cases(group):
        num_rows, kv_heads = len(made[0]), made[0][0][0].num_heads
        q = normal((num_rows, kv_heads * group, 1, 128), 9, mx.bfloat16)
        repeats = max(1, 32 // len(made))
        names = ["by row (CUDA's own, MLX for raw)"]
        works: list[Work] = [
            lambda q=q, made=made: [decode_row_by_row(q, SegmentedKV(rows), SCALE, None) for rows in made]
        ]
        for enough in GROUPS:
            steps = planned(enough, q, made)
            names.append(f"portable, {enough} groups")
            works.append(lambda q=q, steps=steps: [metal_decode.attend(q, step) for step in steps])
        for path, seconds in zip(names, timed(works, repeats), strict=True):
            each = seconds / len(made)
            rate = stored(made[0]) / each
            yield Speed(case, path, 1e6 * each, rate / 1e9, rate / copy)


def planned(enough: int, q: mx.array, made: list[Rows]) -> list[metal_decode.MetalStep]:
    """With so many groups for a launch to be enough."""
    metal_launch_plan.ENOUGH_GROUPS = enough
    metal_launch_plan.plan.cache_clear()
    steps = [
        metal_decode.step_of(q, [[metal_decode.read_of(part) for part in parts] for parts in rows], SCALE, None, "cuda")
        for rows in made
    ]
    return [step for step in steps if step is not None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["right", "speed"])
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    told: list[dict[str, object]] = []
    failed = 0
    if options.only != "speed":
        for found in chain(right(), codecs_right()):
            failed += not found.passed
            verdict = "ok   " if found.passed else "WRONG"
            print(
                f"{verdict} {found.error:9.2e} (<= {found.allowed}) first {found.first_s:5.1f} s  {found.case}",
                flush=True,
            )
            told.append(asdict(found))
    if options.only != "right":
        for found in speed(options.group):
            print(
                f"{found.case:44} {found.path:34} {found.microseconds:9.1f} us {found.gigabytes_s:8.0f} GB/s "
                f"{found.share:5.2f} of a copy",
                flush=True,
            )
            told.append(asdict(found))
    if options.json:
        options.json.write_text(json.dumps(told, indent=2))
    print(f"{len(told)} lines, {failed} wrong")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
