"""Hashes of strings, beside GNU's own."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.platform.cuda_compiler import hashed_alike, string_hash

SEED = 0xC70F6907  # what std::hash calls the library with


@pytest.fixture(scope="module")
def of_library() -> Callable[[bytes], int]:
    name = ctypes.util.find_library("stdc++")
    if name is None or sys.platform != "linux" or sys.maxsize < 1 << 32:
        pytest.skip("there is no libstdc++ of 64 bits here")
    function = ctypes.CDLL(name)._ZSt11_Hash_bytesPKvmm  # std::_Hash_bytes(const void*, size_t, size_t)
    function.restype = ctypes.c_uint64
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)
    return lambda text: function(text, len(text), SEED)


@given(text=st.binary(max_size=70))
def test_a_hash_is_the_librarys(of_library: Callable[[bytes], int], text: bytes) -> None:
    assert string_hash(text) == of_library(text)


@given(text=st.binary(max_size=70), other=st.binary(max_size=20))
def test_a_text_gets_the_hash_of_another(text: bytes, other: bytes) -> None:
    alike = hashed_alike(text, other)
    assert alike.startswith(text)
    assert len(alike) - len(text) < 16
    assert string_hash(alike) == string_hash(other)


def test_no_text_has_the_hash_that_mlx_shows_in_its_messages() -> None:
    assert string_hash(b"") == 0x553E93901E462A6E
