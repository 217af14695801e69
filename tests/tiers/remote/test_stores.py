"""What every store must do, on real servers; and what is said where one cannot be used."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Barrier, Thread

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.block_file import Damage, DamagedBlock
from kvstrata.tiers.remote.health import StoreFault, StoreFaultReason
from kvstrata.tiers.remote.open_store import make_store, open_store
from kvstrata.tiers.remote.sealing import Keys, keys_for, keys_of
from kvstrata.tiers.remote.store import KeyValueStore
from kvstrata.tiers.remote.url import ENDPOINTS, parse_url
from tests.tiers.remote.stores import S3, SECRET, Valkey, private_folder, secret_file

NAMES = [f"{number:064x}" for number in range(40)]
WITHOUT_SECRET = Keys(keys_of(b"").names, None)


@pytest.fixture
def store(store_url: str):
    store = make_store(parse_url(store_url))
    yield store
    store.close()


def test_a_value_is_created_once(store: KeyValueStore) -> None:
    assert store.get(NAMES[0], 100) is None
    assert store.create(NAMES[0], b"first", 60.0)
    assert not store.create(NAMES[0], memoryview(b"second"), 60.0)

    assert bytes(store.get(NAMES[0], 100) or b"") == b"first"


def test_one_of_several_writers_wins(store: KeyValueStore) -> None:
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
def test_the_leading_run_is_found(store: KeyValueStore, present: int) -> None:
    for name in NAMES[:present]:
        store.create(name, b"x" * 7, 60.0)

    assert store.leading(NAMES) == [7] * present
    assert store.sizes(NAMES) == [7] * present + [0] * (40 - present)
    assert store.sizes([]) == store.leading([]) == []


def test_values_are_listed_and_deleted(store: KeyValueStore) -> None:
    for name in NAMES[:3]:
        store.create(name, name.encode(), 60.0)

    assert {(each.name, each.nbytes) for each in store.values()} == {(name, 64) for name in NAMES[:3]}
    store.touch(NAMES[:5], 60.0)
    store.delete([NAMES[0], NAMES[9]])
    assert {each.name for each in store.values()} == set(NAMES[1:3])


def test_value_that_is_too_large_is_not_read(store: KeyValueStore) -> None:
    store.create(NAMES[0], b"x" * 1000, 60.0)

    assert len(store.get(NAMES[0], 1000) or b"") == 1000
    with pytest.raises(DamagedBlock) as error:
        store.get(NAMES[0], 999)
    assert error.value.reason is Damage.SIZE


def test_marker_that_is_too_large_is_another_clusters(tmp_path: Path) -> None:
    url = parse_url(private_folder(tmp_path))
    make_store(url).create("cluster", b"x" * 5000, 0.0)

    with pytest.raises(ConfigError, match="another secret"):
        open_store(url, keys_of(SECRET))


def test_what_no_one_uses_expires_and_what_is_touched_stays(server: Valkey) -> None:
    store = make_store(parse_url(server.url))
    for name in NAMES[:2]:
        store.create(name, b"x", 0.5)
    store.touch(NAMES[:1], 60.0)
    time.sleep(0.6)

    assert store.sizes(NAMES[:2]) == [1, 0]
    store.close()


def test_a_folder_is_swept(tmp_path: Path) -> None:
    store = make_store(parse_url(private_folder(tmp_path)))
    store.create("cluster", b"stays", 0.0)
    for name in NAMES[:2]:
        store.create(name, b"x", 0.2)
    time.sleep(0.3)
    store.touch(NAMES[:1], 0.2)

    assert store.sweep(0.2) == 1
    assert {each.name for each in store.values()} == {NAMES[0], "cluster"}


def test_expired_file_of_a_folder_is_not_there_and_is_created_anew(tmp_path: Path) -> None:
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


def test_file_of_a_folder_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, done = make_store(parse_url(private_folder(tmp_path))), list[str]()
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(f"sync {os.fstat(fd).st_size}"), fsync(fd)))
    monkeypatch.setattr(os, "link", lambda *names: (done.append("link"), link(*names)))
    store.create(NAMES[0], b"x" * 1000, 60.0)

    assert done == ["sync 1000", "link"]


def test_empty_file_of_a_folder_is_not_there_and_is_created_anew(tmp_path: Path) -> None:
    """A machine lost power before the bytes of a file were written."""
    store = make_store(parse_url(private_folder(tmp_path)))
    store.create(NAMES[0], b"x", 60.0)
    (path,) = tmp_path.rglob(NAMES[0])
    path.write_bytes(b"")

    assert store.get(NAMES[0], 100) is None
    assert store.create(NAMES[0], b"new", 60.0)
    assert store.get(NAMES[0], 100) == b"new"


def test_servers_of_one_store_have_one_secret(store_url: str, tmp_path: Path) -> None:
    url, keys = parse_url(store_url), keys_of(SECRET)
    first = open_store(url, keys)
    second = open_store(url, keys_for(url, secret_file(tmp_path)))
    held = [value.name for value in first.values()]
    for wrong, word in ((keys_of(SECRET[::-1]), "another secret"), (WITHOUT_SECRET, "and none was given")):
        with pytest.raises(ConfigError, match=word):
            open_store(url, wrong)

    assert [value.name for value in first.values()] == held == ["cluster"]
    first.close()
    second.close()


def test_a_plain_store_is_not_joined_with_a_secret(store_url: str) -> None:
    url = parse_url(store_url)
    open_store(url, WITHOUT_SECRET).close()

    with pytest.raises(ConfigError, match="another secret"):
        open_store(url, keys_of(SECRET))


def test_a_wrong_password_is_said_and_never_shown(server: Valkey) -> None:
    server.require("right")
    url = parse_url(f"redis://:wrong-one@127.0.0.1:{server.port}/0")
    with pytest.raises(ConfigError, match=r"cannot be used \(denied\)") as error:
        open_store(url, keys_of(SECRET))

    assert "wrong-one" not in str(error.value)
    assert "user, password" in str(error.value)
    open_store(parse_url(server.url), keys_of(SECRET)).close()


def test_a_server_that_is_not_there_is_said() -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=r"redis://127.0.0.1:1/0 cannot be used \(unreachable\)"):
        open_store(parse_url("redis://127.0.0.1:1/0"), keys_of(SECRET))


def test_a_bucket_or_folder_that_does_not_exist_is_said(store_url: str, tmp_path: Path) -> None:
    if store_url.startswith("redis"):
        pytest.skip("every database of Redis exists")
    missing = store_url.replace("://blocks-", "://none-").replace("/shared", "/none")
    with pytest.raises(ConfigError, match=r"cannot be used \(no_place\)"):
        open_store(parse_url(missing), keys_of(SECRET))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("variable", ENDPOINTS["s3"])
def test_the_address_that_a_url_names_is_the_one_that_is_used(
    shared_s3: S3, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """It decides whether a secret is needed."""
    place = shared_s3.bucket(monkeypatch)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, "http://127.0.0.1:1")

    open_store(parse_url(f"{place}?endpoint={shared_s3.endpoint}"), keys_of(SECRET)).close()
    with pytest.raises(ConfigError, match=r"cannot be used \(unreachable\)"):
        open_store(parse_url(place), keys_of(SECRET))


def test_a_read_only_replica_is_said(server: Valkey) -> None:
    client = server.client
    client.replicaof("127.0.0.1", 1)
    with pytest.raises(ConfigError, match=r"cannot be used \(read_only\)"):
        open_store(parse_url(server.url), keys_of(SECRET))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    url = parse_url(private_folder(tmp_path))
    folder = tmp_path / "shared"
    folder.chmod(0o500)
    try:
        probe = folder / "probe"
        try:
            probe.touch()
        except OSError:
            with pytest.raises(ConfigError, match=r"cannot be used \(denied\)"):
                open_store(url, keys_of(SECRET))
        else:
            probe.unlink()
            pytest.skip("this user may write everywhere")
    finally:
        folder.chmod(0o700)


def test_a_full_store_is_joined_if_it_is_the_clusters(server: Valkey) -> None:
    url, keys = parse_url(server.url), keys_of(SECRET)
    open_store(url, keys).close()
    server.client.config_set("maxmemory", 1)
    store = open_store(url, keys)
    with pytest.raises(StoreFault) as fault:
        store.create(NAMES[0], b"x", 60.0)
    assert fault.value.reason is StoreFaultReason.FULL
    store.close()
