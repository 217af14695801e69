"""Keys with a large constant part before RoPE: means that turn take it away, plain means do not."""

from __future__ import annotations

import pytest

from tests.kv.offset_keys import WITH_KEYS, errors

# A norm after the projection keeps the others' keys short, whatever the bias: there is little to gain.
CASES = [(name, precision) for name in ("llama", "falcon_h1") for precision in ("planes:8", "planes:4")]
CASES.append(("gpt_oss", "planes:8"))  # at 4 bits a third is gained


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_means_that_turn_halve_the_error_of_keys_with_an_offset(architecture: str, name: str) -> None:
    found = errors(architecture, name)
    assert found.turning < 0.6 * found.plain


@pytest.mark.parametrize("architecture", WITH_KEYS)
def test_means_that_turn_are_never_much_worse(architecture: str) -> None:
    found = errors(architecture, "planes:8")
    assert found.turning < 1.2 * found.plain
