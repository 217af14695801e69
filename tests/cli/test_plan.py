"""`kvstrata plan`: what it prints, as a table and as JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstrata.cli import app, plan
from kvstrata.config import Settings, flag_name
from kvstrata.errors import ConfigError, KvstrataError, ModelError
from tests.models.conftest import write_model
from tests.support.models import tiny_config, tiny_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", tiny_module("llama"), tiny_config("llama"))


def planned(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "100"})
    if isinstance(result.exception, KvstrataError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def as_json(*arguments: str) -> dict[str, Any]:
    return json.loads(planned(*arguments, "--json"))


def test_the_table_has_every_precision_and_the_command(folder: Path) -> None:
    text = planned(str(folder), "--memory", "1GiB", "--backend", "cpu")
    for words in ("tiny", "768MiB of 1GiB (cpu)", "raw", "planes:8/planes:4", "planes:4", "4 conversations of 8,192"):
        assert words in text
    assert f"kvstrata serve {folder}\n" in text


def test_the_advice_says_how_many_conversations_fit_as_the_table_does(folder: Path) -> None:
    size = ("--memory", "1GiB", "--backend", "cpu")
    fit = as_json(str(folder), *size)["precisions"][0]["stored"][0]["conversations"]
    assert fit > 4
    said = " ".join(planned(str(folder), *size).split())
    assert "4 conversations of 8,192 tokens (--conversations, --tokens) stay in memory at raw" in said
    assert f"which has room for {fit:,}" in said


def test_json_says_the_same_and_adds_up(folder: Path) -> None:
    told = as_json(str(folder), "--memory", "1GiB", "--backend", "cpu", "--disk", "2GiB")
    assert told["memory_limit_bytes"] == 768 << 20
    memory = told["memory"]
    assert sum(value for name, value in memory.items() if name != "limit_bytes") <= memory["limit_bytes"]
    raw, *others = told["precisions"]
    assert raw["token_bytes"] == told["kv"]["bytes_per_token"]
    assert [row["tokens"] for row in others] == sorted(row["tokens"] for row in others)
    stored = raw["stored"][0]
    assert stored["disk_conversations"] == (2 << 30) // stored["disk_bytes"]
    assert "--disk-cache-size 2GiB" in told["advice"]["command"]


def test_the_advice_steps_down_when_more_is_wanted(folder: Path) -> None:
    small = ("--memory", "128MiB", "--backend", "cpu")
    counts = {row["k"]: row["stored"][0]["conversations"] for row in as_json(str(folder), *small)["precisions"]}
    wanted = as_json(str(folder), *small, "--conversations", str(counts["raw"] + 1))["advice"]
    assert wanted["fits"]
    assert "--kv-cache-quantization" in wanted["command"]
    too_many = as_json(str(folder), *small, "--conversations", str(counts["planes:4"] + 1))["advice"]
    assert not too_many["fits"]
    assert "--kv-cache-bits 4" in too_many["command"]


def test_every_flag_that_is_advised_is_one_of_serve(folder: Path) -> None:
    asked = ("--precision", "planes:8/planes:4", "--precision", "affine:8", "--precision", "planes:2")
    told = as_json(str(folder), *asked, "--memory", "200MiB", "--memory-limit", "60%", "--disk", "1GiB")
    assert [(row["k"], row["v"]) for row in told["precisions"]] == [
        ("planes:8", "planes:4"),
        ("planes:2", "planes:2"),
    ]
    assert "affine:8" in told["refused"][0]  # its heads have 16 values, and groups have 32
    words = [*told["advice"]["command"].split(), *(flag for row in told["precisions"] for flag in row["flags"])]
    known = {flag_name(name) for name in Settings.model_fields}
    assert {word for word in words if word.startswith("--")} <= known
    assert "--memory-limit 60%" in told["advice"]["command"]


def test_small_macs_leave_a_third_to_others() -> None:
    size = plan.Size.parse
    assert plan._place("metal", size("16GB")).working_set_bytes == 16 * 10**9 * 2 // 3
    assert plan._place("metal", size("64GB")).working_set_bytes == 48 * 10**9
    assert plan._place("cuda", size("64GB")).working_set_bytes == 64 * 10**9


def test_what_makes_no_sense_is_told(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"weights of tiny take .* smaller model"):
        planned(str(folder), "--memory", "256KiB")
    with pytest.raises(ConfigError, match=r"--memory: .* unit 'parsec'"):
        planned(str(folder), "--memory", "36parsec")
    with pytest.raises(ConfigError, match="--memory: a percentage"):
        planned(str(folder), "--memory", "36%")
    with pytest.raises(ConfigError, match="planes has 8, 4 or 2 bits"):
        planned(str(folder), "--precision", "planes:6")
    with pytest.raises(ModelError, match="Next: kvstrata pull no/such"):
        planned("no/such")
