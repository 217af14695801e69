"""GGUF files: the numbers that llama.cpp's package reads, the logits of the model that was written, clear errors."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.find import find_model
from kvstrata.models.gguf import tokenizers
from kvstrata.models.gguf.architectures import config_of, llama3_divisors
from kvstrata.models.gguf.container import BadGguf, Gguf, GgufTensor, read
from kvstrata.models.gguf.convert import convert
from kvstrata.models.gguf.tensor_types import BLOCKS, GROUP, affine, plain
from kvstrata.models.load import load
from tests.models.gguf_files import VOCAB, write_gguf
from tests.support.models import tiny_config, tiny_module

PACKED = [block.name for block in BLOCKS.values() if block.unpack is not None]
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 7, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
# Of 256 values: the 16-bit factors of the K types, by where they lie.
FACTORS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def blocks_of(kind: str, rows: int = 4, width: int = 512) -> np.ndarray:
    """Any codes and small scales, because the package cannot write all types."""
    block = next(each for each in BLOCKS.values() if each.name == kind)
    octets = np.random.default_rng(1).integers(0, 256, (rows * width // block.num_values, block.num_bytes), np.uint8)
    factors = FACTORS.get(kind, (0, 2) if kind.endswith("_1") else (0,))
    for at in factors:
        scale = np.random.default_rng(at).uniform(0.01, 0.02, len(octets)).astype(np.float16)
        octets[:, at : at + 2] = scale[:, None].view(np.uint8)
    return octets


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_the_numbers_that_llama_cpp_reads(kind: str) -> None:
    octets = blocks_of(kind)
    wanted = quants.dequantize(octets.reshape(4, -1), GGMLQuantizationType[kind])
    found = affine(kind, octets.reshape(-1), (4, 512))
    assert found is not None
    scales, biases = found.scales.astype(mx.float32), found.biases.astype(mx.float32)
    dense = np.asarray(mx.dequantize(found.weight, scales, biases, group_size=GROUP, bits=found.bits))
    groups = wanted.reshape(4, -1, GROUP)
    spread = np.repeat(groups.max(-1) - groups.min(-1), GROUP, axis=-1).reshape(wanted.shape)
    error = np.abs(dense - wanted)
    if kind == "Q6_K":
        assert (error <= 0.55 * spread / 255 + 1e-3 * np.abs(wanted).max()).all()  # coded anew, with 8 bits
    else:
        exact = 1e-6 if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0") else 2**-10
        assert (error <= exact * np.abs(wanted).max()).all()


def test_plain_weights_keep_their_values() -> None:
    x = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    half, brain = x.astype(np.float16), (x.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(np.asarray(plain("F16", half.view(np.uint8).reshape(-1), (3, 32))), half)
    assert np.array_equal(np.asarray(plain("F32", x.view(np.uint8).reshape(-1), (3, 32))), half)
    found = plain("BF16", brain.view(np.uint8).reshape(-1), (3, 32))
    assert np.array_equal(np.asarray(found.view(mx.uint16)), brain)


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def a_model(architecture: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    name = ARCHITECTURES[architecture]
    base = "llama" if name == "qwen2" else name
    config = {**tiny_config(base), **SIZES, "model_type": name, "sliding_window_pattern": 6, **changes}
    if name == "qwen2":
        module = importlib.import_module("mlx_lm.models.qwen2")
        mx.random.seed(0)
        model = module.Model(module.ModelArgs.from_dict(config))
        for layer in model.layers:
            layer.self_attn.k_proj.bias = mx.random.normal(layer.self_attn.k_proj.bias.shape)
        mx.eval(model.parameters())
        return model, config
    return tiny_module(base, **{**SIZES, "sliding_window_pattern": 6, **changes}), config


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_a_converted_model_says_what_the_model_says(architecture: str, cache_home: Path, tmp_path: Path) -> None:
    model, config = a_model(architecture)
    path = write_gguf(tmp_path / "tiny.gguf", architecture, model, config)
    loaded = load(str(path), cpu=CpuOptions("raw"))
    assert loaded.name == "tiny"
    assert loaded.path.is_relative_to(cache_home)
    assert (loaded.context_tokens, loaded.eos_ids) == (4096, frozenset({1}))
    ids = mx.array([[5, 9, 33, 2, 17, 40, 6]])
    wanted, found = (np.asarray(each(ids).astype(mx.float32)) for each in (model, loaded.module))
    assert np.abs(found - wanted).max() < 0.01 * wanted.std()


@pytest.mark.usefixtures("cache_home")
def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    model, config = a_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", "llama", model, config)
    first = find_model(str(path)).folder
    written = (first / "config.json").stat().st_mtime_ns
    assert find_model(str(path)).folder == first
    assert (first / "config.json").stat().st_mtime_ns == written
    (first / "config.json").unlink()
    assert find_model(str(path)).folder == first
    assert (first / "config.json").is_file()
    write_gguf(path, "llama", model, {**config, "rope_theta": 500.0})
    other = find_model(str(path)).folder
    assert other != first
    assert json.loads((other / "config.json").read_text())["rope_theta"] == 500.0


def bad(path: Path, change: Any) -> str:
    octets = bytearray(path.read_bytes())
    change(octets)
    broken = path.with_name("broken.gguf")
    broken.write_bytes(octets)
    with pytest.raises(BadGguf) as failed:
        read(broken)
    return str(failed.value)


def test_damaged_files_are_clear_errors(tmp_path: Path) -> None:
    model, config = a_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", "llama", model, config)
    size = path.stat().st_size
    assert "not a GGUF file" in bad(path, lambda octets: octets.__setitem__(slice(0, 4), b"ABCD"))
    assert "version 9" in bad(path, lambda octets: octets.__setitem__(slice(4, 8), struct.pack("<I", 9)))
    assert "cut off" in bad(path, lambda octets: octets.__delitem__(slice(size - 100, size)))
    assert "ends in the middle of its header" in bad(path, lambda octets: octets.__delitem__(slice(200, size)))
    assert "entries" in bad(path, lambda octets: octets.__setitem__(slice(8, 16), struct.pack("<Q", 1 << 60)))
    with pytest.raises(BadGguf, match="cannot be read"):
        read(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(BadGguf, match="cannot be read"):
        read(tmp_path / "empty.gguf")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 2000), value=st.integers(0, 255))
def test_a_changed_byte_of_the_header_never_crashes(
    at: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "gguf"
    path = folder / "tiny.gguf"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        write_gguf(path, "llama", *a_model("llama"))
    octets = bytearray(path.read_bytes())
    octets[at] = value
    broken = folder / "broken.gguf"
    broken.write_bytes(octets)
    with contextlib.suppress(BadGguf):
        config_of(read(broken))


@pytest.mark.parametrize(
    "changes",
    [{"llama.attention.head_count": 0}, {"llama.embedding_length": "wide"}, {"general.alignment": 0}],
)
def test_settings_that_make_no_sense_are_clear_errors(changes: dict[str, Any], tmp_path: Path) -> None:
    model, config = a_model("llama")
    if "llama.attention.head_count" in changes:
        changes = {**changes, "llama.attention.key_length": None}
    path = write_gguf(tmp_path / "odd.gguf", "llama", model, config, **changes)
    with pytest.raises(BadGguf, match=r"make no sense|aligns"):
        config_of(read(path))


def test_what_is_not_known_is_refused_before_anything_is_written(cache_home: Path, tmp_path: Path) -> None:
    model, config = a_model("llama")

    def says(**changes: Any) -> str:
        path = write_gguf(tmp_path / "odd.gguf", "llama", model, config, **changes)
        with pytest.raises(BadGguf) as failed:
            find_model(str(path))
        return str(failed.value)

    assert "architecture 'mamba'" in says(**{"general.architecture": "mamba"})
    assert "splits text as 'tekken'" in says(**{"tokenizer.ggml.pre": "tekken"})
    assert "of kind 'bert'" in says(**{"tokenizer.ggml.model": "bert"})
    assert "no tokenizer" in says(**{"tokenizer.ggml.tokens": None, "tokenizer.ggml.token_type": None})
    assert "does not say llama.block_count" in says(**{"llama.block_count": None})
    assert "by 'dynamic'" in says(**{"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 2.0})
    made = cache_home / "models" / "gguf"
    assert not made.exists() or not list(made.iterdir())


def test_split_files_are_one_model(tmp_path: Path) -> None:
    model, config = a_model("llama")
    whole = read(write_gguf(tmp_path / "tiny.gguf", "llama", model, config))
    first = write_gguf(tmp_path / "t-00001-of-00002.gguf", "llama", model, config)
    with pytest.raises(BadGguf, match="is not beside it"):
        read(first)
    write_gguf(tmp_path / "t-00002-of-00002.gguf", "llama", model, config)
    assert read(first).tensors.keys() == whole.tensors.keys()


def test_tensors_of_another_type_or_name_are_refused(tmp_path: Path) -> None:
    odd = GgufTensor("blk.0.ssm_a", (4, 4), "F32", np.zeros(64, np.uint8))
    model, config = a_model("llama")
    gguf = read(write_gguf(tmp_path / "tiny.gguf", "llama", model, config))
    with pytest.raises(BadGguf, match="ssm_a"):
        convert(Gguf(gguf.path, gguf.metadata, {**gguf.tensors, odd.name: odd}), tmp_path, lambda _: None)


def test_positions_of_llama_3_are_known_by_their_divisors(tmp_path: Path) -> None:
    model, config = a_model("llama", rope_theta=500_000.0)
    gguf = read(write_gguf(tmp_path / "tiny.gguf", "llama", model, config))
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 8192}
    divisors = llama3_divisors(scaling, 500_000.0, 8).astype("<f4")

    def with_divisors(numbers: np.ndarray) -> dict[str, Any]:
        tensor = GgufTensor("rope_freqs.weight", numbers.shape, "F32", numbers.view(np.uint8))
        return config_of(Gguf(gguf.path, gguf.metadata, {**gguf.tensors, tensor.name: tensor}))

    assert with_divisors(divisors)["rope_scaling"] == {"rope_type": "llama3", **scaling}
    with pytest.raises(BadGguf, match="not Llama 3's"):
        with_divisors(divisors + np.arange(8, dtype="<f4"))


PIECES = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc", "abc", "ca", "\u2581", "\u2581a", "\u2581ab", "aa", "aaa"]
SCORES = [0.0, 0.0, 0.0, -20.0, -21.0, -22.0, -3.0, -2.0, -1.0, -5.0, -23.0, -4.0, -2.5, -6.0, -7.0]


def by_score(text: str) -> list[str]:
    """SentencePiece's rule, step by step: of neighbours that make a token the best are merged, the first of equals."""
    ranks = dict(zip(PIECES, SCORES, strict=True))
    parts = list(text.replace(" ", "\u2581"))
    while True:
        merged = [(ranks[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not merged:
            return parts
        _, place = max(merged)
        parts[-place : -place + 2] = [parts[-place] + parts[-place + 1]]


@given(text=st.text("abc ", min_size=1, max_size=12))
def test_pieces_are_merged_by_their_scores(text: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(PIECES) - 3)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
    }
    gguf: Any = SimpleNamespace(path=Path("x.gguf"), metadata=metadata)
    tokenizer = tokenizers.build(gguf)
    found = tokenizer.encode(text)
    assert found.tokens == ["<s>", *by_score(text)]
    assert tokenizer.decode(found.ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("qwen2", "a 1234", ["a", "\u0120", "1", "2", "3", "4"]),
        ("llama-bpe", "a1234", ["a", "123", "4"]),
        ("smollm", "a12", ["a", "1", "2"]),
    ],
)
def test_numbers_are_split_as_each_kind_splits_them(pre: str, text: str, expected: list[str]) -> None:
    tokens = ["a", "\u0120", *"1234", "12", "123", "34"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "12 3", "3 4"],
        "tokenizer.ggml.token_type": [1] * len(tokens),
    }
    gguf: Any = SimpleNamespace(path=Path("x.gguf"), metadata=metadata)
    assert tokenizers.build(gguf).encode(text).tokens == expected
