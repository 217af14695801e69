"""Models that need the caches of mlx-lm: served one by one, without sharing, with the same tokens."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from kvstrata.errors import ModelError
from kvstrata.models.probe import probe
from tests.engine.drive import Drive
from tests.support.models import FOREIGN, tiny_loaded

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8]]


def test_foreign_model_gets_caches_of_mlx_lm() -> None:
    layout = probe(tiny_loaded(FOREIGN).module)
    assert {spec.kind for spec in layout.layers} == {"foreign"}
    assert "mlx-lm's own caches" in layout.reason
    with pytest.raises(ModelError, match="cannot run"):
        probe(tiny_loaded(FOREIGN).module, 64)


def test_foreign_model_replies_as_in_mlx_lm() -> None:
    loaded = tiny_loaded(FOREIGN)
    drive = Drive(loaded)
    clients = [drive.submit(prompt, 12) for prompt in PROMPTS]
    drive.run()
    for prompt, client in zip(PROMPTS, clients, strict=True):
        wanted = [token for token, _ in generate_step(mx.array(prompt), loaded.module, max_tokens=12)]
        assert client.ids == wanted
