"""Conformance of every `KeyValueStore` on real servers, and properties of single implementations."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Barrier, Thread

import pytest

from kvstrata.tiers.block_file import Damage, DamagedBlock
from kvstrata.tiers.remote.open_store import make_store
from kvstrata.tiers.remote.store import KeyValueStore
from kvstrata.tiers.remote.url import parse_url
from tests.tiers.remote.stores import Valkey, private_folder

NAMES = [f"{number:064x}" for number in range(40)]


@pytest.fixture
def store(store_url: str):
    store = make_store(parse_url(store_url))
    yield store
    store.close()


def test_create_existing_name_keeps_the_first_value(store: KeyValueStore) -> None:
    assert store.get(NAMES[0], 100) is None
    assert store.create(NAMES[0], b"first", 60.0)
    assert not store.create(NAMES[0], memoryview(b"second"), 60.0)

    assert bytes(store.get(NAMES[0], 100) or b"") == b"first"


def test_create_by_concurrent_writers_keeps_one_value(store: KeyValueStore) -> None:
    barrier, won = Barrier(6), list[int]()

    def write(number: int) -> None:
        barrier.wait()
        if store.create(NAMES[1], bytes([number]) * 1000, 60.0):
            won.append(number)

    writers = [Thread(target=write, args=(number,)) for number in range(6)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()

    assert len(won) == 1
    assert bytes(store.get(NAMES[1], 1000) or b"") == bytes(won) * 1000


@pytest.mark.parametrize("present", [0, 1, 2, 16, 17, 39, 40])
def test_leading_returns_sizes_before_the_first_absent_value(store: KeyValueStore, present: int) -> None:
    for name in NAMES[:present]:
        store.create(name, b"x" * 7, 60.0)

    assert store.leading(NAMES) == [7] * present
    assert store.sizes(NAMES) == [7] * present + [0] * (40 - present)
    assert store.sizes([]) == store.leading([]) == []


def test_values_after_delete_are_the_remaining_ones(store: KeyValueStore) -> None:
    for name in NAMES[:3]:
        store.create(name, name.encode(), 60.0)

    assert {(each.name, each.nbytes) for each in store.values()} == {(name, 64) for name in NAMES[:3]}
    store.touch(NAMES[:5], 60.0)
    store.delete([NAMES[0], NAMES[9]])
    assert {each.name for each in store.values()} == set(NAMES[1:3])


def test_get_value_above_the_limit_is_damage(store: KeyValueStore) -> None:
    store.create(NAMES[0], b"x" * 1000, 60.0)

    assert len(store.get(NAMES[0], 1000) or b"") == 1000
    with pytest.raises(DamagedBlock) as error:
        store.get(NAMES[0], 999)
    assert error.value.reason is Damage.SIZE


def test_redis_store_unused_value_expires_and_touched_value_stays(server: Valkey) -> None:
    store = make_store(parse_url(server.url))
    for name in NAMES[:2]:
        store.create(name, b"x", 0.5)
    store.touch(NAMES[:1], 60.0)
    time.sleep(0.6)

    assert store.sizes(NAMES[:2]) == [1, 0]
    store.close()


def test_folder_store_sweep_deletes_expired_values_only(tmp_path: Path) -> None:
    store = make_store(parse_url(private_folder(tmp_path)))
    store.create("cluster", b"stays", 0.0)
    for name in NAMES[:2]:
        store.create(name, b"x", 0.2)
    time.sleep(0.3)
    store.touch(NAMES[:1], 0.2)

    assert store.sweep(0.2) == 1
    assert {each.name for each in store.values()} == {NAMES[0], "cluster"}


def test_folder_store_expired_file_is_absent_and_can_be_created_again(tmp_path: Path) -> None:
    now_s = [time.time()]
    store = make_store(parse_url(private_folder(tmp_path)), lambda: now_s[0], ttl_s=60.0)
    store.create("cluster", b"stays", 0.0)
    store.create(NAMES[0], b"old", 60.0)
    now_s[0] += 61.0

    assert store.get(NAMES[0], 100) is None
    assert store.sizes(NAMES[:1]) == [0]
    assert store.leading(NAMES[:1]) == []
    assert [value.name for value in store.values()] == ["cluster"]
    store.touch(NAMES[:1], 60.0)
    assert store.sizes(NAMES[:1]) == [0]
    now_s[0] -= 61.0
    assert store.create(NAMES[0], b"old", 60.0) is False
    now_s[0] += 61.0
    assert store.create(NAMES[0], b"new", 60.0)
    now_s[0] -= 61.0
    assert store.get(NAMES[0], 100) == b"new"


def test_folder_store_create_syncs_the_file_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, done = make_store(parse_url(private_folder(tmp_path))), list[str]()
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(f"sync {os.fstat(fd).st_size}"), fsync(fd)))
    monkeypatch.setattr(os, "link", lambda *names: (done.append("link"), link(*names)))
    store.create(NAMES[0], b"x" * 1000, 60.0)

    assert done == ["sync 1000", "link"]


def test_folder_store_empty_file_is_absent_and_can_be_created_again(tmp_path: Path) -> None:
    """A power cut before the bytes of a file are written leaves it empty."""
    store = make_store(parse_url(private_folder(tmp_path)))
    store.create(NAMES[0], b"x", 60.0)
    (path,) = tmp_path.rglob(NAMES[0])
    path.write_bytes(b"")

    assert store.get(NAMES[0], 100) is None
    assert store.create(NAMES[0], b"new", 60.0)
    assert store.get(NAMES[0], 100) == b"new"
