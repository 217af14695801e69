"""The step-down policy beside eviction, on a tiny model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import ladder
from tests.support.models import tiny_loaded

pytestmark = pytest.mark.slow


def test_a_quarter_of_the_memory_is_enough_with_the_ladder() -> None:
    load = ladder.LadderLoad(chats=8, turns=2, turn_tokens=280, reply_tokens=8, at_once=2)
    evict, stepping = ladder.measure(tiny_loaded("llama"), load)
    assert (evict.policy, stepping.policy) == ("evict", "ladder")
    for run in (evict, stepping):
        assert run.failed == 0
        assert run.requests == 16
        assert run.prompt_tokens == 8 * (280 + 568)
        assert run.samples >= 1
        # Not only when the sampler looked: never.
        assert run.sampled_peak_bytes <= run.peak_bytes <= run.limit_bytes
        assert run.budget_bytes < 0.3 * run.needed_bytes
    assert stepping.hit_rate > 1.2 * evict.hit_rate
    # 0.17 to 0.34: what passes take is measured at the start, and how far they overlap depends on the machine's load.
    assert stepping.hit_rate > 0.1
    assert stepping.stepped_down_spans > 0
    assert evict.stepped_down_spans == 0


def test_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "load", lambda _: tiny_loaded("llama"))
    options = ["--chats", "8", "--turns", "2", "--turn-tokens", "280", "--reply-tokens", "8", "--json"]
    result = CliRunner().invoke(ladder.app, options)
    assert result.exit_code == 0, result.output
    assert [row["policy"] for row in json.loads(result.stdout)] == ["evict", "ladder"]
