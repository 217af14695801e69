"""Our side of `kvstrata bench cpu`, in a process of its own: one JSON command a line on stdin, one answer a line on
stdout. `peers/llama.mjs` answers the same commands and says what they are. Decodes through the engine's own Runner."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from kvstrata.engine.profiling import max_chunk
from kvstrata.engine.request import Sampling
from kvstrata.engine.runner import BatchRow, ModelRunner, PendingStep
from kvstrata.engine.sampling import Sampler
from kvstrata.errors import KvstrataError
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.load import LoadedModel, load
from kvstrata.models.probe import probe
from kvstrata.text.tokens import encode_text

Answer = dict[str, Any]


class Side:
    """A loaded model that answers commands."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._model: Any = loaded.module
        self._runner = ModelRunner(loaded.module, probe(loaded.module))

    def ids(self, text: str) -> Answer:
        return {"ids": encode_text(self._loaded.tokenizer, text)}

    def prefill(self, ids: Sequence[int]) -> Answer:
        began_s = time.perf_counter()
        self._prefilled(ids, len(ids))
        return {"seconds": time.perf_counter() - began_s}

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answer:
        """Each step takes the last token of every sequence. Timed are the steps, not the prompts."""
        sampling = Sampling(temperature=0)
        rows = [
            BatchRow(
                id=i,
                cache=self._prefilled(prompt[:-1], len(prompt) + num_tokens),
                sampler=Sampler(sampling, prompt, self._loaded.vocab_size),
                tokens=prompt[-1:],
            )
            for i, prompt in enumerate(prompts)
        ]
        began_s = time.perf_counter()
        steps = self._steps(rows, num_tokens)
        took_s = time.perf_counter() - began_s
        self._runner.disband()
        return {"seconds": took_s, "replies": [list(reply) for reply in zip(*steps, strict=True)]}

    def logits(self, ids: Sequence[int], into: str) -> Answer:
        cache = self._runner.new_cache(len(ids))
        logits = self._model(mx.array([ids]), cache=cache.caches())[0]
        cache.end_pass(len(ids))
        found = np.array(logits.astype(mx.float32))
        found.tofile(into)
        return {"rows": found.shape[0], "columns": found.shape[1]}

    def _prefilled(self, ids: Sequence[int], capacity: int) -> SequenceCache:
        """In chunks, as an engine does it that has nothing else to do."""
        cache = self._runner.new_cache(capacity)
        for start in range(0, len(ids), max_chunk()):
            self._runner.prefill(cache, list(ids[start : start + max_chunk()]))
        return cache

    def _steps(self, rows: Sequence[BatchRow], num_tokens: int) -> list[list[int]]:
        """One step is always in flight while the one before is read, as in the engine."""
        later = [BatchRow(row.id, row.cache, (), row.sampler) for row in rows]
        flying: PendingStep = self._runner.launch(rows, None)
        found = []
        for _ in range(num_tokens - 1):
            following = self._runner.launch(later, flying)
            found.append(flying.sampled.read())
            flying = following
        found.append(flying.sampled.read())
        return found


def resident_bytes() -> int:
    """Mapped pages included."""
    return psutil.Process().memory_info().rss


def _load(path: str | None, weights: Any, activations: Any) -> tuple[Side, Answer]:
    _import_libraries()
    before = resident_bytes()
    loaded = load(path, cpu=CpuOptions(weights, activations))
    after = resident_bytes()
    answer = {"before_bytes": before, "after_bytes": after, "process_bytes": after, "weights": loaded.weights}
    return Side(loaded), answer


def _import_libraries() -> None:
    """What a process has whatever its model: llama.cpp's are loaded before its model too."""
    for name in ("mlx_lm.utils", *(("kvstrata.packed.block",) if find_spec("numba") else ())):
        import_module(name)


def main() -> None:
    # Whatever else is printed must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    mx.set_default_device(mx.cpu)
    side: Side | None = None
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        name = command.pop("do")
        try:
            if name == "load":
                side, answer = _load(**command)
            else:
                assert side is not None, "load comes first"
                commands = {"ids": side.ids, "prefill": side.prefill, "decode": side.decode, "logits": side.logits}
                answer = partial(commands[name], **command)()
        except KvstrataError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
