"""Through the front door: what becomes of weights on a CPU is said, and KV of one form is never another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs import backends
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.load import LoadedModel, load
from tests.engine.test_disk import make_computing_slow
from tests.models.conftest import QUANTIZATION, quantized_module, write_model
from tests.support.models import tiny_config
from tests.support.servers import Served, running

pytestmark = pytest.mark.skipif(backends.runtime().backend != "cpu", reason="packed weights are for a CPU with numba")

PROMPT = [5 + i % 80 for i in range(300)]
RAW, EXACT, CODED = CpuOptions("raw"), CpuOptions(activations=32), CpuOptions(activations=16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {**tiny_config("qwen3"), "quantization": QUANTIZATION}
    return write_model(tmp_path / "tiny", quantized_module("qwen3"), config)


def ask(served: Served, prompt: list[int], max_tokens: int = 24) -> dict[str, Any]:
    answer = served.ask("/v1/completions", prompt=prompt, max_tokens=max_tokens, temperature=0)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_packed_model_is_served_and_says_so(folder: Path) -> None:
    texts: dict[str, str] = {}
    for name, options in (("raw", RAW), ("exact", EXACT), ("coded", CODED)):
        with running(load(str(folder), cpu=options)) as served:
            texts[name] = ask(served, PROMPT)["choices"][0]["text"]
            again = ask(served, PROMPT)
            assert cached(again) == len(PROMPT) - 1
            assert again["choices"][0]["text"] == texts[name]
            with served.http() as client:
                weights = client.get("/props").json()["model"]["weights"]
            assert (
                weights
                == {
                    "raw": "float32",
                    "exact": "packed; activations in products: float32",
                    "coded": "packed; activations in products: 16 bits",
                }[name]
            )
    assert texts["raw"] == texts["exact"] == texts["coded"]


def test_blocks_on_the_disk_belong_to_a_form(folder: Path, tmp_path: Path) -> None:
    disk = {"disk_cache_dir": tmp_path / "cache", "disk_cache_size": "64MiB"}
    found: dict[str, list[int]] = {"raw": [], "exact": [], "coded": []}
    for _ in range(2):
        for name, options in (("raw", RAW), ("exact", EXACT), ("coded", CODED)):
            with running(load(str(folder), cpu=options), **disk) as served:
                served.server.state.engine.ask(make_computing_slow).result(60)
                found[name].append(cached(ask(served, PROMPT)))
                served.wait_idle()
    for name, (first, second) in found.items():
        assert first == 0, name
        assert second > 0, name


@pytest.mark.parametrize("count", [8, pytest.param(256, marks=pytest.mark.slow)])
def test_greedy_tokens_of_the_default_model(default_model: LoadedModel, count: int) -> None:
    """The same as those of the float32 model: exactly, and with 16 bits of activations."""
    from mlx_lm.models.cache import make_prompt_cache

    models = [load(None, cpu=RAW), load(None, cpu=EXACT), default_model]
    prompt = default_model.tokenizer.encode("The history of the printing press begins")
    replies = []
    for loaded in models:
        caches, ids, made = make_prompt_cache(loaded.module), prompt, []
        for _ in range(count):
            logits: Any = loaded.module(mx.array([ids]), cache=caches)
            ids = [int(np.argmax(logits[0, -1]))]
            made += ids
        replies.append(made)
    assert replies[0] == replies[1] == replies[2]
