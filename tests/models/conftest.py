"""Tiny models written as real model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.models import VOCAB, tiny_config, tiny_module

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
QUANTIZATION = {"group_size": 32, "bits": 4}


def write_tokenizer(folder: Path) -> None:
    alphabet = ["Ġ", *sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 2]]  # Ġ stands for a space
    vocabulary = {"<end>": 0, **{letter: index for index, letter in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_model(folder: Path, module: nn.Module, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights: Any = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def can_be_quantized(_path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module["weight"].shape[-1] % QUANTIZATION["group_size"] == 0


def quantized_module(architecture: str, *, bits: int = QUANTIZATION["bits"], **overrides: Any) -> nn.Module:
    module = tiny_module(architecture, **overrides)
    nn.quantize(module, group_size=QUANTIZATION["group_size"], bits=bits, class_predicate=can_be_quantized)
    mx.eval(module.parameters())
    return module


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A whole llama of a few thousand float32 weights."""
    return write_model(tmp_path / "tiny", tiny_module("llama"), tiny_config("llama"))
