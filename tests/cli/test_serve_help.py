"""`kvstrata serve --help` fits a screen, and every text of `--help-all` makes sense alone."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from kvstrata.cli import app
from kvstrata.config import Settings, env_name, flag_name

FIELDS = Settings.model_fields.items()
LEAST_WORDS = 7
# Words that stand for something that was named before: in a list of settings, nothing was.
POINTERS = re.compile(r"likewise|such|those|these|thereof|therein|the former|the latter|as above", re.IGNORECASE)
FIRST_WORDS = {"that", "this", "it", "its", "they", "their", "them", "he", "there", "here", "same", "so", "also", "and"}
# 'that' at the end of a clause, or before a noun of settings, is no relative pronoun.
BARE_THAT = re.compile(r"\bthat(?=[.,;:]|$| (?:precision|many|size|folder|file|limit|store|number|time|long)\b)")


def shown(*arguments: str, columns: int) -> list[str]:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_fits_a_screen(flag: str) -> None:
    lines = shown(flag, columns=80)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for common in ("MODEL", "--port", "--api-key", "--memory-limit", "--disk-cache-dir", "--help-all"):
        assert common in text
    assert 10 <= sum(line.startswith("  --") for line in lines) <= 16
    assert "--cache-type-k" not in text


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_all_cuts_no_name_short(columns: int) -> None:
    lines = shown("--help-all", columns=columns)
    words = " ".join(lines).split()
    for name, field in FIELDS:
        assert f"[{env_name(name)}]" in words
        if name != "model":
            assert flag_name(name) in words or f"{flag_name(name)}," in words
        assert str(field.description).split()[-1].rstrip(".") + "." in words
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_text_makes_sense_alone(name: str) -> None:
    text = str(Settings.model_fields[name].description)
    assert len(text.split()) >= LEAST_WORDS, text
    assert text[0].isupper(), text
    assert not text.endswith("."), text
    assert text.split()[0].lower() not in FIRST_WORDS, text
    assert not POINTERS.search(text), text
    assert not BARE_THAT.search(text), text


def test_what_was_wrong_is_found() -> None:
    """The texts that gave rise to the rules break them."""
    assert BARE_THAT.search("which is that precision")
    assert POINTERS.search("Fewest bits of values, likewise")
    assert POINTERS.search("Prompt tokens between two such points")
