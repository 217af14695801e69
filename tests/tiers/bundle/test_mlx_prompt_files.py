"""`kv.mlx_prompt_files.read_table`: headers of safetensors files from untrusted clients."""

from __future__ import annotations

import io
import json

import pytest

from kvstrata.errors import UnusableFile
from kvstrata.kv import mlx_prompt_files
from kvstrata.kv.mlx_prompt_files import LENGTH_BYTES, MAX_HEADER_VALUES, read_table


def test_read_table_header_with_too_many_values_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing 64 MiB of brackets would make 20 million lists and block all threads for seconds."""
    parsed: list[bytes] = []
    monkeypatch.setattr(mlx_prompt_files.json, "loads", lambda text: parsed.append(text) or {})
    for num_values in (MAX_HEADER_VALUES, MAX_HEADER_VALUES + 1):
        header = b'{"a":' + b"[" * (num_values - 1)
        content = len(header).to_bytes(LENGTH_BYTES, "little") + header
        if num_values == MAX_HEADER_VALUES:
            read_table(io.BytesIO(content), 0, len(content))
        else:
            with pytest.raises(UnusableFile, match=f"more than {MAX_HEADER_VALUES} values"):
                read_table(io.BytesIO(content), 0, len(content))
    assert len(parsed) == 1


def test_read_table_small_header_is_read() -> None:
    header = json.dumps({"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    content = len(header).to_bytes(LENGTH_BYTES, "little") + header + b"abcd"
    assert read_table(io.BytesIO(content), 0, len(content)).read("a") == b"abcd"
