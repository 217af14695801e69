"""`kvstrata bench serve`: loads are the same for the same seed, figures follow from times, a real server answers."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from typer.testing import CliRunner

from kvstrata.bench import load
from kvstrata.bench.chat_client import Answer, ChatServer, PrefillTime, fit
from kvstrata.bench.load import SentRequest, alone, spread, summarize, table
from kvstrata.bench.trace import load_trace
from kvstrata.bench.workloads import LOADS, LoadRequest, LoadShape, count, from_trace, prompt_tokens, text, user
from kvstrata.cli.bench import app
from kvstrata.errors import KvstrataError
from kvstrata.models.load import LoadedModel
from tests.support.models import byte_model
from tests.support.servers import running
from tests.text.chat_templates import LLAMA

SHAPE = LoadShape(chats=3, turns=4, system=20, turn=10, reply=4)
SERVER = ChatServer("http://127.0.0.1:1", "m")


@pytest.mark.parametrize("name", LOADS)
def test_the_same_seed_gives_the_same_requests_and_another_seed_others(name: str) -> None:
    lanes = LOADS[name](SHAPE)
    assert lanes == LOADS[name](SHAPE)
    assert lanes != LOADS[name](LoadShape(3, 4, 20, 10, 4, seed=1))
    assert sum(map(len, lanes)) == SHAPE.chats * SHAPE.turns


def test_texts_have_as_many_words_as_asked_for_and_part_at_once() -> None:
    assert count(text("a", 500)) == 500
    assert text("a", 3) != text("b", 3)


def test_chats_alternate_over_one_system_prompt() -> None:
    (lane,) = LOADS["alternating"](SHAPE)
    assert [ask.chat for ask in lane[:4]] == ["chat 0", "chat 1", "chat 2", "chat 0"]
    assert len({str(ask.messages[0]) for ask in lane[:3]}) == 1
    assert all(message["role"] == "user" for ask in lane[3:] for message in ask.messages)


def test_a_trace_becomes_prompts_that_share_what_its_blocks_share(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 30, "output_length": 900, "hash_ids": [1, 2, 3]},
        {"timestamp": 9000, "input_length": 10, "hash_ids": [4]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    lanes = from_trace(load_trace(path), block_tokens=10, speed=2.0, max_requests=2, reply_tokens=16)
    first, second = (lane[0] for lane in lanes)
    assert (first.at_s, second.at_s) == (0.0, 1.0)
    assert (first.reply_tokens, second.reply_tokens) == (3, 16)
    assert prompt_tokens(second.messages) == 30
    assert second.messages[0]["content"].startswith(first.messages[0]["content"])


@given(st.floats(0.001, 0.5), st.floats(1e-4, 1e-2), st.floats(0, 1e-6), st.integers(1, 8000), st.floats(0, 1))
def test_computed_tokens_are_what_the_time_was_made_from(a: float, b: float, c: float, n: int, share: float) -> None:
    known = PrefillTime(a, b, c)
    computed = round(n * share)
    assert known.computed_tokens(n, known.seconds(n, computed)) == pytest.approx(computed, abs=1)


@given(st.floats(0.001, 0.5), st.floats(1e-4, 1e-2), st.floats(0, 1e-6))
def test_a_fit_of_exact_times_gives_the_same_times(a: float, b: float, c: float) -> None:
    true = PrefillTime(a, b, c)
    found = fit([(n, true.seconds(n, n)) for n in (64, 256, 1024, 3000)])
    for n in (64, 500, 3000):
        assert found.seconds(n, n) == pytest.approx(true.seconds(n, n), rel=0.02)
    assert min(found.fixed_s, found.token_s, found.pair_s) >= 0


def test_noise_does_not_make_parts_negative_and_one_length_is_refused() -> None:
    found = fit([(64, 0.30), (64, 0.40), (256, 0.31), (1024, 1.0)])
    assert min(found.fixed_s, found.token_s, found.pair_s) >= 0
    with pytest.raises(KvstrataError, match="two lengths"):
        fit([(64, 0.3), (64, 0.4)])


def made(
    began_s: float, first_s: float, *, prompt: int = 100, cached: int | None = None, failure: str = ""
) -> SentRequest:
    times = tuple(began_s + first_s + 0.1 * i for i in range(5))
    answer = Answer(began_s, times, times[-1], "x", prompt, cached, 5, failure)
    return SentRequest(LoadRequest("chat", (user("x"),), 5), answer, 90)


def test_figures_of_answers() -> None:
    known = PrefillTime(0.0, 0.01, 0.0)
    asked = [made(0, 1.0, cached=0), made(10, 0.25, cached=75), made(20, 9.0, failure="status 500")]
    found = summarize(SERVER, "x", asked, took_s=2.0, clients=1, known=known)
    assert found.failures == ["status 500"]
    assert (found.requests, found.prompt_tokens, found.reply_tokens, found.reply_tokens_s) == (3, 200, 10, 5.0)
    assert (found.cached_reported, found.cached_inferred, found.judged_requests) == (75, 75, 2)
    assert found.between_tokens is not None
    assert found.between_tokens.p50 == pytest.approx(0.1)
    assert found.first_token is not None
    assert found.first_token.largest == 1.0
    assert "37.5%" in table([found])
    assert "status 500" in table([found])


def test_percentiles() -> None:
    found = spread([float(i) for i in range(101)])
    assert found is not None
    assert (found.p50, found.p99, found.largest) == (50.0, 99.0, 100.0)
    assert spread([]) is None


def test_requests_beside_others_are_not_judged_by_their_time() -> None:
    one, beside, later = made(0, 1.0), made(0.5, 2.0), made(10, 1.0)
    assert alone([one, beside, later], [one, beside, later]) == [later]


def chatting() -> LoadedModel:
    """A tiny model whose tokenizer has a chat template."""
    hf = copy.deepcopy(byte_model().tokenizer._tokenizer)
    hf.chat_template = LLAMA
    return replace(byte_model(), tokenizer=TokenizerWrapper(hf))


def test_a_real_server_reports_and_shows_what_it_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CALIBRATION_TOKENS", (8, 32, 64))
    flags = ["--chats", "2", "--turns", "3", "--system-tokens", "60", "--turn-tokens", "10", "--reply-tokens", "3"]
    with running(chatting()) as served:
        done = CliRunner().invoke(app, ["serve", served.url, *flags, "--seed", "5", "--json"])
        again = CliRunner().invoke(
            app, ["serve", served.url, *flags, "--seed", "5", "--load", "agents", "--no-calibrate"]
        )
    assert done.exit_code == 0, done.output
    rows = {row["load"]: row for row in json.loads(done.stdout)}
    assert set(rows) == set(LOADS)
    assert all(row["requests"] == 6 and not row["failures"] for row in rows.values())
    assert all(0 < row["cached_reported"] < row["prompt_tokens"] for row in rows.values())
    # The second chat finds the system prompt of the first one.
    assert rows["shared-system"]["cached_reported"] > rows["multi-turn"]["cached_reported"]
    assert all(row["judged_requests"] == 6 and row["prefill_time"] for row in rows.values())
    assert again.exit_code == 0, again.output
    assert "agents" in again.stdout


def test_an_address_without_a_server_is_said() -> None:
    done = CliRunner().invoke(app, ["serve", "http://127.0.0.1:9", "--no-calibrate"])
    assert "No OpenAI-compatible server answers" in str(done.exception)
