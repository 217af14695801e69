"""`kvstrata cache ls|verify|gc` on a folder that an engine has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli.cache import app
from tests.engine.test_disk import answer, engine_on
from tests.support.models import tiny_loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache")
    with engine_on(path, tiny_loaded("llama")) as engine:
        answer(engine, "first", 600)
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_ls_lists_the_chain(folder: Path) -> None:
    code, text = run("ls", str(folder), "--json")
    blocks = json.loads(text)["blocks"]
    assert code == 0
    assert [block["start"] for block in blocks] == sorted(block["start"] for block in blocks)
    assert sum(block["tokens"] for block in blocks) == 611  # the last token of a reply is never computed
    assert "files" in run("ls", str(folder))[1]


def test_verify_finds_damage_and_gc_removes_it(folder: Path) -> None:
    code, text = run("verify", str(folder), "--json")
    assert (code, json.loads(text)["damaged"]) == (0, [])
    assert json.loads(run("gc", str(folder), "--json")[1])["files"] == []
    first = sorted(folder.rglob("*.safetensors"))[0]
    octets = bytearray(first.read_bytes())
    octets[20] ^= 1
    first.write_bytes(octets)
    code, text = run("verify", str(folder))
    assert code == 1
    assert first.name in text
    would = json.loads(run("gc", str(folder), "--dry-run", "--json")[1])["files"]
    assert str(first) in would
    assert first.exists()
    run("gc", str(folder))
    assert not first.exists()
    assert run("verify", str(folder))[0] == 0


def test_what_could_not_be_read_is_said_and_is_no_success(tmp_path: Path) -> None:
    path = tmp_path / "blocks" / "00" / f"{bytes(32).hex()}.base.safetensors"
    path.parent.mkdir(parents=True)
    path.symlink_to("/etc/hostname")
    for command in ("verify", "ls"):
        code, text = run(command, str(tmp_path))
        assert code == 1
        assert "1 could not be read" in text or "1 that could not be read" in text
        assert path.name in text
        code, text = run(command, str(tmp_path), "--json")
        assert (code, json.loads(text)["unread"]) == (1, [{"file": str(path), "reason": "not_a_file"}])


def test_gc_refuses_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "7.tmp").write_text("mine")
    assert run("gc", str(tmp_path))[0] == 1
    assert (tmp_path / "tmp" / "7.tmp").read_text() == "mine"
