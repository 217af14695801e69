"""Servers of versions 1 and 2 on one store: neither reads, lists, touches, sweeps nor deletes values of the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block_file import Damage, DamagedBlock
from kvstrata.tiers.interface import TierMatch
from kvstrata.tiers.read_pool import MissingBlock, MissReason
from kvstrata.tiers.remote import folder_store, object_store, redis_store, sealing
from kvstrata.tiers.remote.block_store import VerifiedStore, list_sealed_blocks, verify_store
from kvstrata.tiers.remote.open_store import make_store
from kvstrata.tiers.remote.sealing import Keys, is_name, keys_of, seal, unseal
from kvstrata.tiers.remote.url import parse_url
from tests.tiers.disk.blocks import all_same, content_of
from tests.tiers.remote.chains import longest_chain, put_chain, random_ids, read_all
from tests.tiers.remote.stores import SECRET, open_remote, private_folder, secret_file

DAY_S = 86_400.0


@contextmanager
def server_of(version: int) -> Iterator[None]:
    """Use the names and seals of a version. The content of values differs too, but is not emulated."""
    with pytest.MonkeyPatch.context() as patch:
        if version == 1:
            for module in (redis_store, object_store, folder_store):
                patch.setattr(module, "PREFIX", "kvstrata1")
            patch.setattr(sealing, "SEALED", b"kvsrem1s")
            patch.setattr(sealing, "PLAIN", b"kvsrem1p")
        yield


def values_of(version: int, url: str) -> dict[str, bytes]:
    with server_of(version):
        store = make_store(parse_url(url))
        values = {value.name: bytes(store.get(value.name, 1 << 30) or b"") for value in store.values()}
        store.close()
    return values


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_tier_leaves_values_of_another_version_unchanged(
    store_url: str, tmp_path: Path, first: int, second: int
) -> None:
    pytest.importorskip("cryptography")
    secret, ids = secret_file(tmp_path), random_ids(51, 768)
    with server_of(first):
        tier = open_remote(store_url, secret)
        put = put_chain(tier, ids, (512,))
        tier.close()
    values = values_of(first, store_url)
    assert sum(map(is_name, values)) == len(put) == 4

    with server_of(second):
        tier = open_remote(store_url, secret, ttl_s=DAY_S, ahead_s=30 * DAY_S)
        assert longest_chain(tier, ids) == TierMatch()
        absent = [MissingBlock(block.id, MissReason.ABSENT) for block in put]
        assert read_all(tier, [block.id for block in put]) == absent
        store = tier.block_store.store
        assert list_sealed_blocks(store) == []
        assert verify_store(store, keys_of(SECRET), chain) == VerifiedStore(0, 0, 0, ())
        tier.touch(block.id for block in put)
        tier.remove([block.id for block in put])
        tier.block_store.sweep()
        assert tier.flush(10.0).is_empty
        tier.close()
    assert values_of(first, store_url) == values

    with server_of(second):
        tier = open_remote(store_url, secret)
        own = put_chain(tier, ids, (512,))
        came = read_all(tier, [block.id for block in own])
        assert all_same(came, own)
        tier.close()
    assert values_of(first, store_url) == values
    assert values_of(second, store_url).keys() == values.keys(), "the names of blocks are those of version 1"


@pytest.mark.parametrize("keys", [keys_of(SECRET), Keys(b"", None)], ids=["sealed", "plain"])
def test_unseal_value_of_version_1_is_damage(keys: Keys) -> None:
    pytest.importorskip("cryptography")
    with server_of(1):
        sealed = bytes(seal(keys, "name", b"body"))
        assert unseal(keys, "name", sealed) == b"body"
    with pytest.raises(DamagedBlock) as damage:
        unseal(keys, "name", sealed)
    assert damage.value.reason is Damage.SEAL


@pytest.mark.parametrize("is_sealed", [True, False])
def test_value_contains_the_bytes_of_a_block_file(tmp_path: Path, is_sealed: bool) -> None:
    if is_sealed:
        pytest.importorskip("cryptography")
    keys = keys_of(SECRET) if is_sealed else Keys(b"", None)
    tier = open_remote(private_folder(tmp_path), secret_file(tmp_path) if is_sealed else None)
    (block,) = put_chain(tier, random_ids(52, 256))
    name = tier.block_store.names.name_of(block.id)
    sealed = tier.block_store.store.get(name, 1 << 20)
    assert sealed is not None
    assert bytes(unseal(keys, name, sealed)) == content_of(block)
    tier.close()
