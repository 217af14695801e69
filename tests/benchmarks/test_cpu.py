"""The CPU benchmark on a tiny GGUF file: ours alone, and beside llama.cpp where make peers has installed it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import cpu
from benchmarks.cpu import EXACT, LLAMA, CpuFigures, CpuLoad, GgufModel, measure, table
from benchmarks.cpu_worker import LlamaCppPeer, SideFailed, WorkerProcess, find_peer, our_command, running
from tests.models.gguf_files import VOCAB, write_gguf
from tests.support.models import tiny_config, tiny_module

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
TEXT = "HELLOABWORLD" * 8
LOAD = CpuLoad("raw", (32,), batches=(1, 3), prefills=(40,), prompt_tokens=9, reply_tokens=6, text_tokens=30, text=TEXT)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its converted folder is kept under a home of its own, by the processes that are started too."""
    folder = tmp_path_factory.mktemp("gguf")
    before = os.environ.get("KVSTRATA_HOME")
    os.environ["KVSTRATA_HOME"] = str(folder / "home")
    config = {**tiny_config("llama"), **SIZES}
    yield write_gguf(folder / "tiny.gguf", "llama", tiny_module("llama", **SIZES), config)
    if before is None:
        del os.environ["KVSTRATA_HOME"]
    else:
        os.environ["KVSTRATA_HOME"] = before


@pytest.fixture(scope="module")
def ours(gguf: Path) -> Iterator[WorkerProcess]:
    with running("ours", our_command()) as side:
        side.ask("load", path=str(gguf), weights="raw", activations=32)
        yield side


def rates(figures: CpuFigures) -> set[tuple[str, str]]:
    return {(row.work, row.side) for row in figures.rates}


def test_ours_alone_have_every_figure_and_no_ratio(gguf: Path) -> None:
    said: list[str] = []
    load = replace(LOAD, weights="8", activations=(8, 32))
    figures = measure(
        GgufModel(gguf, str(gguf)), LlamaCppPeer(missing="not here"), load, rounds=1, progress=said.append
    )
    sides = {"ours, activations of 8", "ours, activations of 32"}
    assert rates(figures) == {(w, s) for w in ("decode alone", "decode at 3", "prefill of 40") for s in sides}
    assert all(row.tokens_s > 0 and row.ratio is None for row in figures.rates)
    exact = next(row for row in figures.sides if row.side == f"ours, activations of {EXACT}")
    assert (exact.kl_mean, exact.top1) == (0.0, 1.0)
    rounded = next(row for row in figures.sides if row is not exact)
    assert rounded.kl_mean is not None
    assert 0 < rounded.kl_mean < 0.1
    assert rounded.weights.startswith("packed, plain ones quantized to 8 bits")
    assert all(row.process_bytes > row.loaded_bytes for row in figures.sides)
    assert {row.side for row in figures.sides} == sides
    assert "prefill of 40, ours, activations of 8, round 1" in said
    text = table(figures)
    assert "not here" in text
    assert text.count("decode at 3") == 2
    assert json.loads(json.dumps(figures.as_json()))["rates"][0]["ratio"] is None


def test_without_the_exact_side_there_is_no_kl(gguf: Path) -> None:
    load = replace(LOAD, activations=(16,), batches=(1,))
    figures = measure(GgufModel(gguf, str(gguf)), LlamaCppPeer(missing="not here"), load, rounds=1)
    assert [(row.kl_mean, row.top1) for row in figures.sides] == [(None, None)]


def test_a_batch_decodes_what_each_prompt_gives_alone(ours: WorkerProcess) -> None:
    prompts = [[5, 9, 11, 30], [7, 8, 20, 41, 33], [60, 3]]
    together = ours.ask("decode", prompts=prompts, num_tokens=12)["replies"]
    alone = [ours.ask("decode", prompts=[prompt], num_tokens=12)["replies"][0] for prompt in prompts]
    assert together == alone
    assert {len(reply) for reply in together} == {12}


def test_the_first_token_of_a_reply_has_the_largest_logit(ours: WorkerProcess, tmp_path: Path) -> None:
    prompt = [5, 9, 11, 30]
    logprobs = cpu._logprobs(ours, prompt, tmp_path)
    assert logprobs.shape == (4, VOCAB)
    assert ours.ask("decode", prompts=[prompt], num_tokens=2)["replies"][0][0] == logprobs[-1].argmax()


def test_prompts_of_a_batch_differ_and_long_ones_repeat_the_text() -> None:
    alone, batch, prefill = cpu._works(LOAD, range(20))
    assert alone.command["prompts"] == [list(range(9))]
    assert batch.command["prompts"][2] == [18, 19, 0, 1, 2, 3, 4, 5, 6]
    assert (batch.num_tokens, prefill.num_tokens) == (18, 40)
    assert prefill.command["ids"] == [*range(20), *range(20)]


def test_a_side_that_cannot_load_says_why(tmp_path: Path, gguf: Path) -> None:
    del gguf
    with running("ours", our_command()) as side, pytest.raises(SideFailed, match="There is no file"):
        side.ask("load", path=str(tmp_path / "missing.gguf"), weights="auto", activations=8)


def test_a_side_that_ends_is_an_error_and_not_a_wait() -> None:
    with running("theirs", [sys.executable, "-c", "input()"]) as side, pytest.raises(SideFailed, match="theirs ended"):
        side.ask("prefill", ids=[1])


def test_a_peer_that_cannot_load_leaves_ours_alone(gguf: Path, tmp_path: Path) -> None:
    failing = "import json; input(); print(json.dumps({'error': 'unknown architecture'}), flush=True); input()"
    peer = LlamaCppPeer((sys.executable, "-c", failing), tmp_path)
    load = replace(LOAD, batches=(1,), text_tokens=0)
    figures = measure(GgufModel(gguf, str(gguf)), peer, load, rounds=1)
    assert figures.missing == "llama.cpp: unknown architecture"
    assert {row.side for row in figures.rates} == {"ours, activations of 32"}


def test_where_llama_cpp_is_not_installed_the_next_step_is_told(tmp_path: Path) -> None:
    assert "make peers" in find_peer(tmp_path).missing


def test_the_command_says_what_is_missing_and_shows_ours(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "find_peer", lambda: LlamaCppPeer(missing="llama.cpp is not installed. Next: make peers"))
    options = ["--activations", "32", "--batches", "1", "--prefills", "8", "--reply-tokens", "2", "--rounds", "1"]
    result = CliRunner().invoke(cpu.app, [str(gguf), *options, "--text-tokens", "0", "--json"])
    assert result.exit_code == 0, result.output
    assert "make peers" in result.stderr
    figures = json.loads(result.stdout)
    assert [row["work"] for row in figures["rates"]] == ["decode alone", "prefill of 8"]
    assert (figures["peer"], figures["model"]) == ("", "tiny.gguf")


def test_other_bits_are_refused(gguf: Path) -> None:
    result = CliRunner().invoke(cpu.app, [str(gguf), "--activations", "8,12"])
    assert result.exit_code == 2


def test_beside_llama_cpp_both_sides_have_the_same_tokens_and_every_ratio(
    gguf: Path, ours: WorkerProcess, tmp_path: Path
) -> None:
    peer = find_peer()
    if peer.missing:
        pytest.skip(peer.missing)
    figures = measure(GgufModel(gguf, str(gguf)), peer, LOAD, rounds=1)
    assert figures.missing == ""
    assert figures.peer.startswith("node-llama-cpp 3.22.1")
    assert {row.side for row in figures.rates} == {"ours, activations of 32", LLAMA}
    assert all((row.ratio is None) == (row.side == LLAMA) for row in figures.rates)
    theirs = next(row for row in figures.sides if row.side == LLAMA)
    # The file's float32 is 16 bits here, and KV is there.
    assert theirs.kl_mean is not None
    assert theirs.kl_mean < 1e-5
    with running(LLAMA, peer.command, peer.folder) as side:
        side.ask("load", path=str(gguf), threads=1)
        prompts = [[5, 9, 11, 30], [7, 8, 20, 41, 33], [60, 3]]
        found = side.ask("decode", prompts=prompts, num_tokens=8)["replies"]
        # Nothing is put before the ids: the logits of one token are those of that token alone.
        assert abs(cpu._logprobs(side, [5], tmp_path) - cpu._logprobs(ours, [5], tmp_path)).max() < 0.002
    assert found == ours.ask("decode", prompts=prompts, num_tokens=8)["replies"]
