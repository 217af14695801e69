"""Speed of encoding and decoding each precision on this machine, beside a plain copy of the same vectors.

A rate counts bytes read and bytes written: for a copy twice the vectors, for encoding and decoding the vectors and
their codes. The vectors are one layer of a long conversation and exceed a GPU's cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import mlx.core as mx
import typer

from benchmarks.common import Rounds, command_line, run_app
from kvstrata.bench.figures import Figure, Progress, in_turns, lay_out, silent
from kvstrata.cli.bench_options import Json, say, show
from kvstrata.codecs.registry import parse_for

CODECS = ("planes:8", "planes:4", "planes:2", "affine:8", "affine:4")

KV_HEADS, DIM = 8, 128

CALLS = 4  # in one go: a single one is too short for a GPU's clock


@dataclass(frozen=True)
class CodecRate(Figure):
    what: str
    microseconds: float
    gigabytes_s: float
    of_copy: float  # rate, as a share of the copy's


@dataclass(frozen=True)
class CodecRates(Figure):
    num_tokens: int
    dtype: str
    rates: tuple[CodecRate, ...]


def measure(num_tokens: int, rounds: int, dtype: mx.Dtype, progress: Progress = silent) -> CodecRates:
    x = mx.random.normal((KV_HEADS, num_tokens, DIM), key=mx.random.key(0)).astype(dtype)
    mx.eval(x)
    cases = dict(_cases(x))
    for _, work in cases.values():
        work()  # compiles
    found = in_turns({name: _timed(work) for name, (_, work) in cases.items()}, rounds, progress)
    middle = {name: statistics.median(times) for name, times in found.items()}
    copied = cases["copy"][0] / middle["copy"]
    rates = [
        CodecRate(name, middle[name] * 1e6, nbytes / middle[name] / 1e9, nbytes / middle[name] / copied)
        for name, (nbytes, _) in cases.items()
    ]
    return CodecRates(num_tokens, str(dtype).removeprefix("mlx.core."), tuple(rates))


def _cases(x: mx.array) -> Iterator[tuple[str, tuple[int, Callable[[], object]]]]:
    """Yield each case's name, the bytes that it reads and writes, and the work."""
    bits = x.view(mx.uint16 if x.itemsize == 2 else mx.uint32)
    yield "copy", (2 * x.nbytes, lambda: mx.eval(bits | 0))
    for name in CODECS:
        codec = parse_for(name, DIM)
        planes = codec.encode(x)
        nbytes = x.nbytes + planes.nbytes
        yield f"{name}, encode", (nbytes, lambda codec=codec: codec.encode(x))
        yield f"{name}, decode", (nbytes, lambda codec=codec, planes=planes: mx.eval(codec.decode(planes, x.dtype)))


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def seconds_each() -> float:
        mx.synchronize()
        began_s = time.perf_counter()
        for _ in range(CALLS):
            work()
        mx.synchronize()
        return (time.perf_counter() - began_s) / CALLS

    return seconds_each


def table(figures: CodecRates) -> str:
    return lay_out(
        figures.rates,
        [
            ("", "<20", lambda rate: rate.what),
            ("us", ">12,.0f", lambda rate: rate.microseconds),
            ("GB/s", ">10.2f", lambda rate: rate.gigabytes_s),
            ("of a copy", ">12.3f", lambda rate: rate.of_copy),
        ],
        f"{figures.num_tokens:,} tokens x {KV_HEADS} heads of {DIM}, {figures.dtype}.",
    )


app = command_line()


@app.command()
def main(
    tokens: Annotated[int, typer.Option(min=64, help="Tokens that are encoded and decoded at once.")] = 8192,
    rounds: Rounds = 5,
    sixteen: Annotated[bool, typer.Option("--bf16/--float32", help="Dtype of the vectors before encoding.")] = True,
    as_json: Json = False,
) -> None:
    """Measure how fast each precision is encoded and decoded, in GB/s, beside a plain copy."""
    dtype = mx.bfloat16 if sixteen else mx.float32
    show(measure(tokens, rounds, dtype, progress=say), table, as_json=as_json)


if __name__ == "__main__":
    run_app(app)
