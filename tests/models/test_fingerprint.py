"""The identity of a model follows its content, not its place, and is not fooled by an old time stamp."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvstrata.models.fingerprint import BIG_FILE_BYTES, fingerprint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "home"))
    place = tmp_path / "model"
    place.mkdir()
    (place / "model.safetensors").write_bytes(os.urandom(2 * BIG_FILE_BYTES))
    (place / "config.json").write_text("{}")
    (place / "tokenizer.json").write_text("{}")
    (place / "chat_template.jinja").write_text("{{ messages }}")
    return place


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def test_it_stays_when_the_model_moves(folder: Path) -> None:
    before = fingerprint(folder)
    moved = Path(shutil.copytree(folder, folder.with_name("other name")))
    assert fingerprint(moved) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_it_changes_with_every_file_that_matters(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    flip_byte(folder / name)
    assert fingerprint(folder) != before


def test_an_old_time_stamp_does_not_hide_new_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before, status = fingerprint(folder), weights.stat()
    flip_byte(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint(folder) != before


def test_defaults_of_sampling_do_not_count(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.1}')
    assert fingerprint(folder) == before


def test_the_second_time_reads_no_weights(folder: Path) -> None:
    before = fingerprint(folder)
    remembered = (folder.parent / "home" / "fingerprints.json").read_text()
    assert str(folder.resolve() / "model.safetensors") in remembered
    # Proof that the remembered digest is what counts: another one there gives another identity.
    digest = remembered.rpartition(': "')[2].partition('"')[0]
    (folder.parent / "home" / "fingerprints.json").write_text(remembered.replace(digest, "0" * len(digest)))
    assert fingerprint(folder) != before


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": 1}'])
def test_a_damaged_memory_is_an_empty_one(folder: Path, content: str) -> None:
    before = fingerprint(folder)
    (folder.parent / "home" / "fingerprints.json").write_text(content)
    assert fingerprint(folder) == before


def test_a_cache_folder_that_cannot_be_written_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(folder)
    monkeypatch.setenv("KVSTRATA_HOME", "/dev/null/here")
    assert fingerprint(folder) == before
