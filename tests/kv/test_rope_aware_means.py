"""Planes of keys with a large constant offset before RoPE: RoPE-aware means remove it, plain means do not."""

from __future__ import annotations

import pytest

from tests.kv.offset_keys import WITH_KEYS, errors

# In the other models a norm after the projection keeps keys short despite the bias, so there is little to gain.
CASES = [(name, precision) for name in ("llama", "falcon_h1") for precision in ("planes:8", "planes:4")]
CASES.append(("gpt_oss", "planes:8"))  # at 4 bits a third is gained


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_rope_aware_means_nearly_halve_the_error_of_biased_keys(architecture: str, name: str) -> None:
    found = errors(architecture, name)
    assert found.rope_aware < 0.6 * found.plain


@pytest.mark.parametrize("architecture", WITH_KEYS)
def test_rope_aware_means_are_not_much_worse_in_any_architecture(architecture: str) -> None:
    found = errors(architecture, "planes:8")
    assert found.rope_aware < 1.2 * found.plain
