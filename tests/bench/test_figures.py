"""Every figure on a tiny model: the fields that programs rely on, and what must hold whatever the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.bench.figures import in_turns, lay_out
from kvstrata.cli.bench import app

WIKITEXT = Path(__file__).parents[3] / "shared" / "text" / "wikitext2_test_raw.txt"


def test_cases_take_turns_and_every_other_round_goes_backwards() -> None:
    said: list[str] = []
    assert in_turns({"a": lambda: 1, "b": lambda: 2}, 2, said.append) == {"a": [1, 1], "b": [2, 2]}
    assert said == ["a, round 1", "b, round 1", "b, round 2", "a, round 2"]


def test_a_table_has_its_names_over_its_values() -> None:
    text = lay_out(
        [("raw", 1.25), ("none", "why")], [("cache", "<7", lambda r: r[0]), ("MiB", ">6.1f", lambda r: r[1])]
    )
    assert text == "cache     MiB\nraw       1.2\nnone      why"


def test_json_is_one_value_and_nothing_else() -> None:
    command = ["kv-cache", "--layers", "2", "--seq-len", "32", "--heads", "2", "--head-dim", "64", "--json"]
    result = CliRunner().invoke(app, [*command, "--codecs", "raw,planes:4"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["codec"] for row in rows] == ["raw", "planes:4"]
    # Against 16 bits, and as much as is really allocated.
    assert rows[0]["full_bytes"] == 2 * 2 * 2 * 32 * 64 * 2
    assert rows[1]["allocated_bytes"] == pytest.approx(rows[1]["nbytes"], rel=0.02)
