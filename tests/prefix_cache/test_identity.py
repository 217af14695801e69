"""Every field decides the key, and no two identities spell the same bytes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvstrata.prefix_cache.keys import KEY_BYTES, OWNER_BYTES, Identity, chain, owner_key, owner_of, root_key

BASE = Identity("a1b2", "float32", ("full", "window:4096:4"), 8192)
ROOT = root_key(BASE, "")

# Few letters, so that examples often differ only in where one field ends and the next begins.
TEXTS = st.text("ab1:\0", max_size=3)
IDENTITIES = st.builds(
    Identity, TEXTS, TEXTS, st.lists(TEXTS, max_size=3).map(tuple), st.sampled_from([None, 0, 1, 11])
)
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@pytest.mark.parametrize(
    "other",
    [
        Identity("a1b3", BASE.dtype, BASE.layout, BASE.max_kv_size),
        Identity(BASE.fingerprint, "bfloat16", BASE.layout, BASE.max_kv_size),
        Identity(BASE.fingerprint, BASE.dtype, ("full", "window:4096:0"), BASE.max_kv_size),
        Identity(BASE.fingerprint, BASE.dtype, ("window:4096:4", "full"), BASE.max_kv_size),
        Identity(BASE.fingerprint, BASE.dtype, BASE.layout, None),
    ],
)
def test_every_field_changes_the_key(other: Identity) -> None:
    assert root_key(other, "") != root_key(BASE, "")


@given(IDENTITIES, TEXTS, IDENTITIES, TEXTS)
def test_keys_are_equal_only_where_everything_is(one: Identity, salt: str, other: Identity, other_salt: str) -> None:
    assert (root_key(one, salt) == root_key(other, other_salt)) == ((one, salt) == (other, other_salt))
    assert len(root_key(one, salt)) == KEY_BYTES


def test_text_does_not_flow_from_one_field_into_the_next() -> None:
    assert root_key(Identity("ab", "c", ("full",)), "") != root_key(Identity("a", "bc", ("full",)), "")
    assert root_key(Identity("a", "b", ("full", "x")), "") != root_key(Identity("a", "b", ("full",)), "x")
    assert root_key(Identity("a", "b", ("full", "full")), "") != root_key(Identity("a", "b", ("fullfull",)), "")
    assert root_key(Identity("a", "b", (), 1), "") != root_key(Identity("a", "b", ()), "1")


@given(TEXTS, TEXTS)
def test_roots_tell_whose_they_are(salt: str, other: str) -> None:
    assert root_key(BASE, salt).startswith(owner_key(BASE, owner_of(salt)))
    assert root_key(BASE, salt).startswith(owner_key(BASE, owner_of(other))) == (owner_of(salt) == owner_of(other))


def test_an_owner_is_what_comes_before_the_first_colon() -> None:
    assert [owner_of(salt) for salt in ("", "a", "a:", "a:b:c", ":b")] == ["", "a", "a", "a", ""]
    assert len({root_key(BASE, salt)[OWNER_BYTES:] for salt in ("a", "a:", "a:b", "a:b:c")}) == 4


def test_half_a_surrogate_pair_is_a_salt_like_any_other() -> None:
    assert len({root_key(BASE, salt) for salt in ("\ud800", "\udc00", "")}) == 3


def test_keys_stay_what_they_are() -> None:
    """Golden: blocks on disk are found by these."""
    root = root_key(Identity("f" * 64, "float32", ("full", "full")), "salt")
    assert root.hex() == "42f9b0627cbb642a5269c848a380347118d99e07b6c84f3a331457eea7ce4f8d"
    assert chain(root, [1, 2, 3]).hex() == "c146babd2419c8b743b802e37f40485f98175862a7164b4921bca3bdb4a96307"


@given(TOKENS, TOKENS)
def test_a_chained_key_names_all_that_came_before(first: list[int], second: list[int]) -> None:
    keys = {
        chain(ROOT, first),
        chain(ROOT, second),
        chain(chain(ROOT, first), second),
        chain(chain(ROOT, second), first),
    }
    assert len(keys) == (2 if first == second else 4)
    assert chain(ROOT, [*first, *second]) not in keys  # how the tokens were grouped is part of the name


def test_the_same_tokens_have_one_key_however_they_are_held() -> None:
    ids = np.arange(20, dtype=np.int32)
    assert chain(ROOT, ids[::2]) == chain(ROOT, list(range(0, 20, 2))) == chain(ROOT, ids[::2].astype(np.int64))
    assert chain(ROOT, ids) != chain(root_key(BASE, "another"), ids)


@pytest.mark.parametrize(
    ("parent", "tokens", "what"),
    [(b"", [1], "32 bytes"), (ROOT, [], "at least one"), (ROOT, [2**31], "from 0"), (ROOT, [-1], "from 0")],
)
def test_what_cannot_be_a_key_is_refused(parent: bytes, tokens: list[int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        chain(parent, tokens)
