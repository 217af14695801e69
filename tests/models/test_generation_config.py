"""generation_config.json: what is taken of it, and that nothing in it stops a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstrata.models.generation_config import FILE_NAME, read_sampling_defaults
from kvstrata.models.load import load


def given(folder: Path, config: Any) -> dict[str, float]:
    (folder / FILE_NAME).write_text(json.dumps(config))
    return read_sampling_defaults(folder).given()


def test_what_is_set_is_taken_and_nothing_else(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path).given() == {}
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 9, "eos_token_id": 3}
    assert given(tmp_path, config) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert given(tmp_path, {"min_p": 0.05, "repetition_penalty": 1.1}) == {"min_p": 0.05, "repetition_penalty": 1.1}
    assert given(tmp_path, {"top_k": None}) == {}


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    assert given(tmp_path, {"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    assert given(tmp_path, {"do_sample": True}) == {}
    assert given(tmp_path, {"bos_token_id": 1}) == {}


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -0.1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        ["temperature"],
    ],
)
def test_what_makes_no_sense_is_left_out_and_said(
    tmp_path: Path, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert given(tmp_path, config) == {}
    assert (FILE_NAME in caplog.text) == isinstance(config, dict)


def test_a_damaged_file_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    assert read_sampling_defaults(tmp_path).given() == {}
    assert FILE_NAME in caplog.text


def test_a_loaded_model_has_its_defaults_and_all_its_ends(tiny_folder: Path) -> None:
    (tiny_folder / FILE_NAME).write_text(json.dumps({"temperature": 0.3, "eos_token_id": [0, 7, 11]}))
    loaded = load(str(tiny_folder))
    assert loaded.sampling.given() == {"temperature": 0.3}
    assert loaded.eos_ids == frozenset({0, 7, 11})
