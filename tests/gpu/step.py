"""The decode step over addresses on a GPU with CUDA: right, and how fast beside other ways.

    python -m tests.gpu.step [--only hold,right,compiled,speed,long,eight,far] [--all]

Right: against float64 in numpy over what stock operations decode. Compiled: logits of the compiled step beside those
of the step that goes layer by layer. Speed: decode steps of a model of Qwen3-0.6B's shape.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import pairwise
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache

from benchmarks.random_model import QWEN3_0_6B, random_model
from kvstrata.codecs.registry import parse
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.decode_step import CompiledStep
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.probe import probe
from tests.gpu.step_right import cases, right, slow_cases, wide

BEGAN_S = time.perf_counter()
WRONG = "WRONG"  # in what a case says
ROUNDS = 5


Cases = Iterator[tuple[str, Callable[[], str]]]  # with what they say


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN_S:6.1f} s] {text}", flush=True)


def guarded(name: str, work: Callable[[], str]) -> bool:
    """One case that fails does not hide the others. Tells whether it was right."""
    try:
        said = work()
        say(f"{name}: {said}")
    except Exception as error:  # noqa: BLE001
        last = traceback.extract_tb(error.__traceback__)[-1]
        say(
            f"FAILED {name}: {type(error).__name__}: {str(error)[:1500]} ({last.filename.split('/')[-1]}:{last.lineno})"
        )
        return False
    return WRONG not in said


# What launches read is kept until they have ended.


def spinning() -> mx.array:
    """An array that takes the GPU a while."""
    kernel: Any = mx.fast.cuda_kernel(
        name="kvstrata_test_spin",
        input_names=["x"],
        output_names=["out"],
        source="const long long began = clock64(); while (clock64() - began < 400000000LL) {} out[0] = x[0];",
    )
    (out,) = kernel(
        inputs=[mx.zeros((1,))],
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    return out


def held_until_done(*, afterwards: bool) -> str:
    """Given to MLX with the work, or after it was issued."""
    mx.eval(spinning())
    held = mx.zeros((256 << 20,), mx.uint8)
    mx.eval(held)
    out = spinning()
    if afterwards:
        mx.async_eval(out)
        mx.async_eval(mx.zeros((1,)), [held])
    else:
        mx.async_eval(out, [held])
    before = mx.get_active_memory()
    del held
    began_s = time.perf_counter()
    at_once = before - mx.get_active_memory()
    mx.eval(out)
    took_s = time.perf_counter() - began_s
    mx.synchronize()
    time.sleep(0.05)
    later = before - mx.get_active_memory()
    verdict = "ok" if at_once < 1 << 20 and later >= 255 << 20 and took_s > 0.05 else "WRONG"
    return f"{verdict}: freed while it runs {at_once >> 20} MiB, after it {later >> 20} MiB; it ran {took_s:.2f} s on"


# Compiled, and speed.


def filled(model: Any, layout: Layout, name: str, num_tokens: int, room: int, seed: int) -> SequenceCache:
    """A sequence that holds random numbers."""
    cache = SequenceCache(layout, model, num_tokens + room)
    for i, (layer, spec) in enumerate(zip(cache.layers, layout.flat(), strict=True)):
        assert isinstance(layer, FullLayer)
        for first in range(0, num_tokens, 4096):
            count = min(4096, num_tokens - first)
            key = mx.random.key(1000 * seed + 10 * i + first)
            k = mx.random.normal((1, spec.kv_heads, count, spec.k_dim), spec.dtype, key=key)
            layer.append(k, k * 0.5)
            mx.eval(layer.arrays())
    if name != "raw":
        seal(layout, cache, name)
    cache.end_pass(num_tokens)
    return cache


class Decoding:
    """Steps of a batch: layer by layer, or compiled."""

    def __init__(self, model: Any, caches: list[SequenceCache], way: str, compiled: CompiledStep) -> None:
        self.model = model
        self.batch = BatchCache(caches)
        self.way = way
        self.compiled = compiled

    def logits(self, tokens: mx.array) -> mx.array:
        if self.way == "compiled":
            logits = self.compiled.run(tokens, self.batch)
            if logits is not None:
                return logits
            say("  a step went layer by layer")
        logits = self.model(tokens[:, None], cache=self.batch.begin_step())
        self.batch.end_step()
        return logits[:, -1]

    def decode_s(self, num_tokens: int) -> float:
        """One step is always in flight while the one before is read, as an engine does it."""
        token = mx.zeros((len(self.batch.sequences),), mx.int32)
        mx.eval(token)
        began_s = time.perf_counter()
        for _ in range(num_tokens):
            following = mx.argmax(self.logits(token), axis=-1).astype(mx.int32)
            mx.async_eval(following)
            mx.eval(token)
            token = following
        mx.eval(token)
        return time.perf_counter() - began_s


def compiled_right() -> Cases:
    model = random_model(QWEN3_0_6B | {"num_hidden_layers": 6}).module
    layout = probe(model)
    say(f"probed: path {layout.batching}, mixes {layout.mixes}, compiles {layout.compiles}")
    compiled = CompiledStep(model)
    for names in (["raw", "raw", "raw"], ["planes:8", "raw", "planes:4", "planes:8"]):

        def work(names: list[str] = names) -> str:
            found = {}
            for way in ("layers", "compiled"):
                caches = [filled(model, layout, name, 300 + 211 * i, 300, i) for i, name in enumerate(names)]
                decoding = Decoding(model, caches, way, compiled)
                steps = []
                for step in range(7):
                    if step == 4:  # what it reads changes under way
                        seal(layout, caches[1], "planes:8")
                    tokens = (mx.arange(len(names)) + step).astype(mx.int32)
                    steps.append(wide(decoding.logits(tokens)))
                found[way] = np.stack(steps)
            scale = np.abs(found["layers"]).max()
            off = [float(np.abs(a - b).max() / scale) for a, b in zip(found["layers"], found["compiled"], strict=True)]
            return f"{'ok' if all(x < 0.01 for x in off) else 'WRONG'} by step: {' '.join(f'{x:.1e}' for x in off)}"

        yield f"compiled, {', '.join(names)}", work


def seal(layout: Layout, cache: SequenceCache, name: str) -> None:
    for layer, pair in zip(cache.layers, make_plan(layout, parse(name), parse(name)).pairs, strict=True):
        assert isinstance(layer, FullLayer)
        layer.own.encode_past_at_once(*pair, RawWindow())


def mlx_lm_tokens_s(model: Any, batch: int, prompt_tokens: int, reply_tokens: int) -> float:
    generator = BatchGenerator(model)
    prompts = [[(7 * i + 13 * t) % 5000 for t in range(prompt_tokens)] for i in range(batch)]
    order = generator.insert(prompts, [reply_tokens] * batch)
    times: dict[int, list[float]] = {uid: [] for uid in order}
    left = batch
    while left:
        for response in generator.next_generated():
            times[response.uid].append(time.perf_counter())
            left -= response.finish_reason is not None
    generator.close()
    all_began_s = max(each[0] for each in times.values())
    first_ended_s = min(each[-1] for each in times.values())
    between = sum(all_began_s < at <= first_ended_s for each in times.values() for at in each)
    return between / (first_ended_s - all_began_s)


def split_of(decoding: Decoding) -> str:
    """Where the host's time goes in a compiled step."""
    batch = decoding.batch
    tokens = mx.zeros((len(batch.sequences),), mx.int32)
    parts: list[list[float]] = []
    for _ in range(12):
        mx.synchronize()
        at = [time.perf_counter()]
        plan = batch.plan()
        assert plan is not None
        plan.launches()
        at.append(time.perf_counter())
        logits = decoding.compiled.run(tokens, batch)
        assert logits is not None
        at.append(time.perf_counter())
        mx.eval(logits)
        at.append(time.perf_counter())
        parts.append([1e3 * (b - a) for a, b in pairwise(at)])
    prepare, run, wait = (median(each) for each in zip(*parts[2:], strict=True))
    return f"ms: plan {prepare:.2f}, all of it {run:.2f}, then wait {wait:.2f}"


def joining(model: Any, layout: Layout, compiled: CompiledStep) -> str:
    """Rows join one by one: how long the first steps of each new batch take."""
    caches = [filled(model, layout, "raw", 1024 + 32 * i, 64, i) for i in range(12)]
    firsts, usual = [], []
    for size in range(8, 13):
        decoding = Decoding(model, caches[:size], "compiled", compiled)
        times = [decoding.decode_s(1) for _ in range(5)]
        decoding.batch.release()
        firsts.append(1e3 * times[0])
        usual += times[2:]
    return f"ms of the first step {', '.join(f'{x:.1f}' for x in firsts)}; of others {1e3 * median(usual):.1f}"


def speed(batches: Sequence[int], rounds: int = ROUNDS, reply_tokens: int = 40) -> Cases:
    model = random_model().module
    layout = probe(model)
    compiled = CompiledStep(model)
    for size in batches:

        def work(size: int = size) -> str:
            room = 32 + (rounds + 2) * reply_tokens
            ways = {}
            for way in ("layers", "compiled"):
                caches = [filled(model, layout, "raw", 1024 + 32 * i, room, i) for i in range(size)]
                ways[way] = Decoding(model, caches, way, compiled)
                ways[way].decode_s(6)
            runs: dict[str, Callable[[], float]] = {
                way: lambda d=decoding: size * reply_tokens / d.decode_s(reply_tokens) for way, decoding in ways.items()
            }
            runs["mlx-lm"] = lambda: mlx_lm_tokens_s(model, size, 1024, reply_tokens)
            return in_turns(runs, rounds) + "\n" + " " * 12 + split_of(ways["compiled"])

        yield f"speed, batch {size}, 1k", work
    yield "joining", lambda: joining(model, layout, compiled)


def in_turns(runs: dict[str, Callable[[], float]], rounds: int) -> str:
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    last = list(runs)[-1]
    lines = []
    for name, rates in found.items():
        ratio = median([a / b for a, b in zip(rates, found[last], strict=True)])
        lines.append(f"{name} {median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f}; {ratio:.2f})")
    return "tokens/s (range; to " + last + "): " + ", ".join(lines)


def long(batch: int, num_tokens: int = 32768, rounds: int = ROUNDS, reply_tokens: int = 40) -> str:
    model = random_model().module
    layout = probe(model)
    compiled = CompiledStep(model)
    ways: dict[str, Callable[[], float]] = {}
    for name in ("planes:8", "planes:4", "raw"):
        caches = [filled(model, layout, name, num_tokens, 16 + (rounds + 2) * reply_tokens, i) for i in range(batch)]
        decoding = Decoding(model, caches, "compiled", compiled)
        decoding.decode_s(6)
        ways[name] = lambda d=decoding: batch * reply_tokens / d.decode_s(reply_tokens)
    if batch == 1:
        ways = {"mlx-lm": mlx_lm_long(model, layout, num_tokens, reply_tokens), **ways}
    return in_turns(ways, rounds)


def mlx_lm_long(model: Any, layout: Layout, num_tokens: int, reply_tokens: int) -> Callable[[], float]:
    caches = [KVCache() for _ in layout.layers]
    for i, (cache, spec) in enumerate(zip(caches, layout.flat(), strict=True)):
        for first in range(0, num_tokens, 4096):
            key = mx.random.key(i + first)
            k = mx.random.normal((1, spec.kv_heads, 4096, spec.k_dim), spec.dtype, key=key)
            cache.update_and_fetch(k, k)
            mx.eval(cache.keys, cache.values)

    def decode() -> float:
        token = mx.array([0])
        began_s = time.perf_counter()
        for _ in range(reply_tokens):
            following = mx.argmax(model(token[None], cache=caches)[:, -1], axis=-1)
            mx.async_eval(following)
            mx.eval(token)
            token = following
        mx.eval(token)
        return reply_tokens / (time.perf_counter() - began_s)

    return decode


def held_cases(_: argparse.Namespace) -> Cases:
    yield "held", lambda: held_until_done(afterwards=False)
    yield "held, given afterwards", lambda: held_until_done(afterwards=True)


def right_cases(options: argparse.Namespace) -> Cases:
    for case in (*cases(), *(slow_cases() if options.all else ())):
        yield f"right, {case.name}", lambda case=case: right(case)


PARTS: dict[str, Callable[[argparse.Namespace], Cases]] = {
    "hold": held_cases,
    "right": right_cases,
    "compiled": lambda _: compiled_right(),
    "speed": lambda options: speed([int(size) for size in options.batches.split(",")]),
    "long": lambda _: iter([("speed, batch 1, 32k", lambda: long(1))]),
    "eight": lambda _: iter([("speed, batch 8, 32k", lambda: long(8))]),
    "far": lambda _: iter([("speed, batch 1, 128k", lambda: long(1, 131072))]),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(PARTS), help="some of these, in this order")
    parser.add_argument("--batches", default="1,8,16,32")
    parser.add_argument("--all", action="store_true", help="also cases whose kernels take long to compile")
    options = parser.parse_args()
    say(f"mlx {version('mlx')}, CUDA {mx.cuda.is_available()}")
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}")
    # All of them, whatever the first ones find.
    found = [guarded(name, work) for part in parts for name, work in PARTS[part](options)]
    say("end" if all(found) else f"end: {found.count(False)} of {len(found)} failed")
    sys.exit(0 if all(found) else 1)


if __name__ == "__main__":
    main()
