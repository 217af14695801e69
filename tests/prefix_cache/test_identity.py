"""Root keys and chained keys: every field counts, and no two inputs share a key."""

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
def test_root_key_changes_with_every_identity_field(other: Identity) -> None:
    assert root_key(other, "") != root_key(BASE, "")


@given(IDENTITIES, TEXTS, IDENTITIES, TEXTS)
def test_root_keys_are_equal_only_for_equal_identity_and_salt(
    one: Identity, salt: str, other: Identity, other_salt: str
) -> None:
    assert (root_key(one, salt) == root_key(other, other_salt)) == ((one, salt) == (other, other_salt))
    assert len(root_key(one, salt)) == KEY_BYTES


def test_root_key_depends_on_field_boundaries() -> None:
    assert root_key(Identity("ab", "c", ("full",)), "") != root_key(Identity("a", "bc", ("full",)), "")
    assert root_key(Identity("a", "b", ("full", "x")), "") != root_key(Identity("a", "b", ("full",)), "x")
    assert root_key(Identity("a", "b", ("full", "full")), "") != root_key(Identity("a", "b", ("fullfull",)), "")
    assert root_key(Identity("a", "b", (), 1), "") != root_key(Identity("a", "b", ()), "1")


@given(TEXTS, TEXTS)
def test_root_key_starts_with_key_of_its_owner_only(salt: str, other: str) -> None:
    assert root_key(BASE, salt).startswith(owner_key(BASE, owner_of(salt)))
    assert root_key(BASE, salt).startswith(owner_key(BASE, owner_of(other))) == (owner_of(salt) == owner_of(other))


def test_owner_is_text_before_first_colon() -> None:
    assert [owner_of(salt) for salt in ("", "a", "a:", "a:b:c", ":b")] == ["", "a", "a", "a", ""]
    assert len({root_key(BASE, salt)[OWNER_BYTES:] for salt in ("a", "a:", "a:b", "a:b:c")}) == 4


def test_root_key_accepts_lone_surrogates_in_salt() -> None:
    assert len({root_key(BASE, salt) for salt in ("\ud800", "\udc00", "")}) == 3


def test_keys_equal_golden_values() -> None:
    """Compare with recorded keys: blocks on existing disks are found by them."""
    root = root_key(Identity("f" * 64, "float32", ("full", "full")), "salt")
    assert root.hex() == "42f9b0627cbb642a5269c848a380347118d99e07b6c84f3a331457eea7ce4f8d"
    assert chain(root, [1, 2, 3]).hex() == "c146babd2419c8b743b802e37f40485f98175862a7164b4921bca3bdb4a96307"


@given(TOKENS, TOKENS)
def test_chained_key_depends_on_all_earlier_tokens_and_their_grouping(first: list[int], second: list[int]) -> None:
    keys = {
        chain(ROOT, first),
        chain(ROOT, second),
        chain(chain(ROOT, first), second),
        chain(chain(ROOT, second), first),
    }
    assert len(keys) == (2 if first == second else 4)
    assert chain(ROOT, [*first, *second]) not in keys  # the grouping of the tokens is part of the key


def test_chained_key_is_equal_for_any_sequence_type() -> None:
    ids = np.arange(20, dtype=np.int32)
    assert chain(ROOT, ids[::2]) == chain(ROOT, list(range(0, 20, 2))) == chain(ROOT, ids[::2].astype(np.int64))
    assert chain(ROOT, ids) != chain(root_key(BASE, "another"), ids)


@pytest.mark.parametrize(
    ("parent", "tokens", "message"),
    [(b"", [1], "32 bytes"), (ROOT, [], "at least one"), (ROOT, [2**31], "from 0"), (ROOT, [-1], "from 0")],
)
def test_chain_refuses_invalid_parent_or_tokens(parent: bytes, tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain(parent, tokens)
