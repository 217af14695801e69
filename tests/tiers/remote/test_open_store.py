"""Opening a store: its faults are reported at the start, and all servers of a store share one secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.remote.health import StoreFault, StoreFaultReason
from kvstrata.tiers.remote.open_store import make_store, open_store
from kvstrata.tiers.remote.sealing import Keys, keys_for, keys_of
from kvstrata.tiers.remote.url import ENDPOINTS, parse_url
from tests.tiers.remote.stores import S3, SECRET, Valkey, private_folder, secret_file

NAME = "0" * 64
WITHOUT_SECRET = Keys(keys_of(b"").names, None)


def test_open_store_oversized_marker_is_refused(tmp_path: Path) -> None:
    url = parse_url(private_folder(tmp_path))
    make_store(url).create("cluster", b"x" * 5000, 0.0)

    with pytest.raises(ConfigError, match="another secret"):
        open_store(url, keys_of(SECRET))


def test_open_store_with_another_secret_is_refused(store_url: str, tmp_path: Path) -> None:
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


def test_open_store_plain_store_with_a_secret_is_refused(store_url: str) -> None:
    url = parse_url(store_url)
    open_store(url, WITHOUT_SECRET).close()

    with pytest.raises(ConfigError, match="another secret"):
        open_store(url, keys_of(SECRET))


def test_open_store_wrong_password_is_refused_and_not_shown(server: Valkey) -> None:
    server.require_password("right")
    url = parse_url(f"redis://:wrong-one@127.0.0.1:{server.port}/0")
    with pytest.raises(ConfigError, match=r"cannot be used \(denied\)") as error:
        open_store(url, keys_of(SECRET))

    assert "wrong-one" not in str(error.value)
    assert "user, password" in str(error.value)
    open_store(parse_url(server.url), keys_of(SECRET)).close()


def test_open_store_unreachable_server_is_refused() -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=r"redis://127.0.0.1:1/0 cannot be used \(unreachable\)"):
        open_store(parse_url("redis://127.0.0.1:1/0"), keys_of(SECRET))


def test_open_store_missing_bucket_or_folder_is_refused(store_url: str, tmp_path: Path) -> None:
    if store_url.startswith("redis"):
        pytest.skip("every database of Redis exists")
    missing = store_url.replace("://blocks-", "://none-").replace("/shared", "/none")
    with pytest.raises(ConfigError, match=r"cannot be used \(no_place\)"):
        open_store(parse_url(missing), keys_of(SECRET))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("variable", ENDPOINTS["s3"])
def test_open_store_endpoint_of_the_url_overrides_the_environment(
    shared_s3: S3, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """The address decides whether a secret is required, so the environment must not replace it."""
    place = shared_s3.use_bucket(monkeypatch)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, "http://127.0.0.1:1")

    open_store(parse_url(f"{place}?endpoint={shared_s3.endpoint}"), keys_of(SECRET)).close()
    with pytest.raises(ConfigError, match=r"cannot be used \(unreachable\)"):
        open_store(parse_url(place), keys_of(SECRET))


def test_open_store_read_only_replica_is_refused(server: Valkey) -> None:
    client = server.client
    client.replicaof("127.0.0.1", 1)
    with pytest.raises(ConfigError, match=r"cannot be used \(read_only\)"):
        open_store(parse_url(server.url), keys_of(SECRET))


def test_open_store_unwritable_folder_is_refused(tmp_path: Path) -> None:
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


def test_open_store_full_store_with_our_marker_is_opened(server: Valkey) -> None:
    url, keys = parse_url(server.url), keys_of(SECRET)
    open_store(url, keys).close()
    server.client.config_set("maxmemory", 1)
    store = open_store(url, keys)
    with pytest.raises(StoreFault) as fault:
        store.create(NAME, b"x", 60.0)
    assert fault.value.reason is StoreFaultReason.FULL
    store.close()
