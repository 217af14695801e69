"""What precision does to what a model says, on tiny models: the rows, and what must hold whatever the model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from typer.testing import CliRunner

from kvstrata.bench import quality
from kvstrata.bench.load import Watch
from kvstrata.bench.plots import plot_quality
from kvstrata.bench.quality import DECODE_TOKENS, SampleText
from kvstrata.cli.bench import app
from kvstrata.errors import ConfigError
from kvstrata.models.load import LoadedModel
from kvstrata.text.tokenizer import encode_prompt
from tests.support.models import VOCAB, tiny_loaded

WIKITEXT = Path(__file__).parents[3] / "shared" / "text" / "wikitext2_test_raw.txt"


def text(num_tokens: int) -> SampleText:
    rng = random.Random(0)
    return SampleText("made up", [rng.randrange(VOCAB) for _ in range(num_tokens)])


def test_quality_of_full_precision_is_perfect_and_falls_with_the_bits() -> None:
    protocol = quality.QualityProtocol((("planes:8", "planes:8"), ("planes:2", "planes:2")), (64,), 1)
    rows = list(quality.measure(tiny_loaded("llama"), [text(400)], protocol))
    assert [(row.mode, row.k) for row in rows] == [
        (mode, k) for mode in ("prefill", "decode") for k in ("raw", "planes:8", "planes:2")
    ]
    for raw, fine, coarse in (rows[:3], rows[3:]):
        assert raw.kl_mean == 0
        assert raw.top1 == 1
        assert fine.kl_mean < coarse.kl_mean
        assert coarse.bits_per_value < fine.bits_per_value < raw.bits_per_value
        assert fine.ppl == pytest.approx(raw.ppl, rel=1e-2)


def test_quality_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(ConfigError, match="longer --text"):
        quality.measure(tiny_loaded("llama"), [text(100)])
    with pytest.raises(ConfigError, match=r"recurrent state alone.*bench kv-cache"):
        quality.measure(tiny_loaded("mamba2"), [text(2000)])


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next", "falcon_h1"])
def test_quality_with_full_precision_is_the_models_own(architecture: str) -> None:
    """Windows, states and both in one layer: what is encoded as `raw` is what mlx-lm's caches would have held."""
    loaded, ids = tiny_loaded(architecture), text(200).ids
    protocol = quality.QualityProtocol((("planes:2", "planes:2"),), (64,), 1)
    rows = list(quality.measure(loaded, [SampleText("made up", ids)], protocol))
    for raw, coarse in (rows[:2], rows[2:]):
        assert coarse.kl_mean > raw.kl_mean == 0
        first, last = (32, 64) if raw.mode == "prefill" else (64, 64 + DECODE_TOKENS)
        logits = loaded.module(mx.array([list(ids[:last])]), cache=make_prompt_cache(loaded.module))[0, first:]
        surprise = nn.losses.cross_entropy(logits, mx.array(list(ids[first + 1 : last + 1])), reduction="mean")
        assert raw.ppl == pytest.approx(mx.exp(surprise).item(), rel=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not WIKITEXT.is_file(), reason="the shared text wikitext2_test_raw.txt is not beside the checkout")
def test_planes_keep_more_of_what_the_default_model_says_than_affine(default_model: LoadedModel) -> None:
    """At 8 bits half the KL of affine in groups of 64 or less, at 4 bits a third of it or less."""
    names = ("planes:8", "affine:8:g64", "planes:4", "affine:4:g64")
    ids = encode_prompt(default_model.tokenizer, WIKITEXT.read_text(encoding="utf-8"))
    protocol = quality.QualityProtocol(tuple((name, name) for name in names), (512,), 1, ("prefill",))
    rows = {row.k: row for row in quality.measure(default_model, [SampleText("wikitext", ids)], protocol)}
    assert rows["planes:8"].kl_mean <= rows["affine:8:g64"].kl_mean / 2
    assert rows["planes:4"].kl_mean <= rows["affine:4:g64"].kl_mean / 3
    assert rows["planes:8"].bits_per_value < rows["affine:8:g64"].bits_per_value
    assert rows["planes:4"].bits_per_value < rows["affine:4:g64"].bits_per_value


def test_a_plot_is_written(tmp_path: Path) -> None:
    protocol = quality.QualityProtocol((("planes:8", "planes:4"),), (32,), 1)
    plot_quality(list(quality.measure(tiny_loaded("llama"), [text(200)], protocol)), tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_rows_appear_as_they_are_done_and_every_pass_is_told() -> None:
    protocol = quality.QualityProtocol((("planes:8", "planes:8"), ("planes:4", "planes:4")), (32, 48), 2, ("prefill",))
    texts = [text(400), SampleText("other", list(reversed(text(400).ids)))]
    said: list[str] = []
    passes: list[int] = []
    measured = quality.measure(tiny_loaded("llama"), texts, protocol, Watch(said.append, lambda: passes.append(1)))
    next(measured)
    assert (said, len(passes)) == (["made up, prefill, context 32: raw / raw"], 2)
    rest = list(measured)
    assert len(passes) == protocol.num_passes(num_texts=2) == 24
    assert len(said) == len(rest) + 1 == 12
    assert {(row.text, row.context) for row in rest} == {(name, at) for name in ("made up", "other") for at in (32, 48)}


def test_the_worst_window_is_not_above_the_mean_of_all() -> None:
    protocol = quality.QualityProtocol((("planes:2", "planes:2"),), (48,), 3, ("prefill",))
    _, coarse = quality.measure(tiny_loaded("llama"), [text(700)], protocol)
    alone = [
        list(
            quality.measure(
                tiny_loaded("llama"), [SampleText("a window", ids)], quality.QualityProtocol(protocol.pairs, (48,), 1)
            )
        )
        for ids in (text(700).ids[at : at + 48 + DECODE_TOKENS + 1] for at in (0, 261, 522))
    ]
    assert coarse.top1_min == pytest.approx(min(rows[1].top1 for rows in alone))
    assert coarse.top1 == pytest.approx(sum(rows[1].top1 for rows in alone) / 3)


def test_pairs_are_read_as_they_are_written() -> None:
    assert quality.parse_pairs("planes:8/planes:4, affine:4") == (
        ("planes:8", "planes:4"),
        ("affine:4", "affine:4"),
    )
    for wrong in ("planes:8/planes:4/planes:2", "nothing:4", ""):
        with pytest.raises(ConfigError):
            quality.parse_pairs(wrong)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("".join(chr(32 + id_) for id_ in text(400).ids), encoding="utf-8")
    return path


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's model is a tiny one, and each character of its text is a token."""
    monkeypatch.setattr("kvstrata.models.load.load", lambda _model: tiny_loaded("llama", 4))
    monkeypatch.setattr(
        "kvstrata.text.tokenizer.encode_prompt", lambda _tokenizer, words: [ord(word) - 32 for word in words]
    )


@pytest.mark.usefixtures("_tiny")
def test_quality_prints_rows_and_lines_without_a_terminal(words: Path) -> None:
    command = ["quality", "--text", str(words), "--pairs", "planes:4", "--modes", "prefill", "--context", "32,64"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    head, *rows = result.stdout.splitlines()
    assert "of a window" in head
    assert [row.split()[2:5] for row in rows] == [
        [context, name, name] for context in ("32", "64") for name in ("raw", "planes:4")
    ]
    assert result.stderr.splitlines()[0] == "measuring words, prefill, context 32: raw / raw ..."
    told = CliRunner().invoke(app, [*command, "--windows", "1", "--json"])
    assert [(row["text"], row["k"], row["top1_min"] <= row["top1"]) for row in json.loads(told.stdout)] == [
        ("words", name, True) for _ in range(2) for name in ("raw", "planes:4")
    ]
