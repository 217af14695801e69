"""A model of random weights as a folder: what servers that load from one are compared on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models import gated_delta as stock
from typer.testing import CliRunner

from benchmarks import random_model
from benchmarks.random_model import HYBRID, QWEN3_0_6B, write_random_model
from kvstrata.attention import gated_delta
from kvstrata.bench.peers.models import copy_tokenizer
from kvstrata.errors import ConfigError
from kvstrata.kv.layout import arrays_in
from kvstrata.models.default_model import ensure_default_model
from kvstrata.models.load import load

pytestmark = pytest.mark.slow

SMALL = QWEN3_0_6B | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
SMALL_HYBRID = HYBRID | {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}


# Ours has weights of 8 bits, theirs activations of 16. States add up what both round.
@pytest.mark.parametrize(("shape", "tolerance"), [(SMALL, 0.02), (SMALL_HYBRID, 0.1)], ids=["qwen3", "hybrid"])
def test_kvstrata_and_mlx_lm_load_it_and_agree(
    tmp_path: Path, shape: dict[str, Any], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_random_model(tmp_path / "random", ensure_default_model(), shape)
    assert config["vocab_size"] == 49152
    ours = load(str(tmp_path / "random"))
    theirs, tokenizer, *_ = mlx_lm.load(str(tmp_path / "random"))
    assert {array.dtype for array in arrays_in(theirs.parameters())} == {mx.bfloat16}
    chat = [{"role": "user", "content": "the of and to in is that for"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert ours.tokenizer.apply_chat_template(chat, add_generation_prompt=True) == ids
    assert 2 in ours.eos_ids  # as the tokenizer's model has it
    monkeypatch.setattr(stock, "gated_delta_ops", gated_delta.update)
    a = ours.module(mx.array([ids]))
    monkeypatch.setattr(stock, "gated_delta_ops", gated_delta._by_token)
    b = theirs(mx.array([ids])).astype(mx.float32)
    assert mx.abs(a - b).max() < tolerance * mx.abs(b).max(), (mx.abs(a - b).max(), mx.abs(b).max())


def test_the_command_writes_one_and_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "QWEN3_0_6B", SMALL)
    monkeypatch.setattr(random_model, "HYBRID", SMALL_HYBRID)
    for options, layers in ((), 2), (("--hybrid",), 4):
        folder = tmp_path / f"of-{layers}"
        result = CliRunner().invoke(random_model.app, [str(folder), *options])
        assert result.exit_code == 0, result.output
        assert f"{layers} layers" in result.output
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == layers
        with pytest.raises(ConfigError, match="not empty"):
            random_model.main(folder)


def test_the_vocabulary_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    """Also where the model sees pictures, too; and where it cannot be told, nothing is written."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    copy_tokenizer(ensure_default_model(), theirs)
    config = json.loads((ensure_default_model() / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({"text_config": {"vocab_size": config["vocab_size"]}}))
    assert write_random_model(tmp_path / "made", theirs, SMALL)["vocab_size"] == config["vocab_size"]
    (theirs / "config.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(ConfigError, match="vocab_size"):
            write_random_model(tmp_path / "other", theirs, SMALL)
        (theirs / "config.json").unlink(missing_ok=True)
    assert not (tmp_path / "other").exists()
