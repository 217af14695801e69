"""Credentials without all permissions: opening a store fails with a reason and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.config import load
from kvstrata.errors import ConfigError
from kvstrata.platform.device import device
from kvstrata.server.build import build_server
from kvstrata.tiers.remote.open_store import open_store
from kvstrata.tiers.remote.sealing import keys_of
from kvstrata.tiers.remote.url import parse_url
from tests.support.models import tiny_loaded
from tests.tiers.remote.cloud_emulators import GoogleFront
from tests.tiers.remote.stores import S3, SECRET, Valkey, secret_file

ALL = ("s3:GetObject", "s3:ListBucket", "s3:PutObject", "s3:DeleteObject")
PASSWORD = "hunter2-very-secret"


def denial_of(url: str) -> str:
    with pytest.raises(ConfigError, match=r"cannot be used \(denied\).*may read, write, list and delete") as error:
        open_store(parse_url(url), keys_of(SECRET))
    return str(error.value)


@pytest.mark.parametrize("lacks", [*ALL, "all of them"])
def test_open_store_s3_user_without_a_permission_is_refused(
    shared_s3: S3, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    url = shared_s3.use_bucket(monkeypatch)
    user = shared_s3.make_user(*(each for each in ALL if lacks not in (each, "all of them")))
    shared_s3.log_in(monkeypatch, user)
    with shared_s3.enforcing_permissions():
        said = denial_of(url)

    assert user[1] not in said
    assert object_names(shared_s3, url) == []


def test_open_store_s3_user_with_all_permissions_is_accepted(shared_s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    url = shared_s3.use_bucket(monkeypatch)
    shared_s3.log_in(monkeypatch, shared_s3.make_user(*ALL))
    with shared_s3.enforcing_permissions():
        open_store(parse_url(url), keys_of(SECRET)).close()

    assert object_names(shared_s3, url) == ["some/prefix/kvstrata2/cluster"]


def test_build_server_unknown_s3_credentials_are_refused(
    shared_s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A whole server is started."""
    url = shared_s3.use_bucket(monkeypatch)
    flags = {"remote_cache": url, "remote_secret_file": secret_file(tmp_path)}
    for user in (("AKIASTRANGER", PASSWORD), (shared_s3.make_user(*ALL)[0], PASSWORD)):
        shared_s3.log_in(monkeypatch, user)
        with shared_s3.enforcing_permissions(), pytest.raises(ConfigError, match=r"cannot be used \(denied\)") as error:
            build_server(load(flags=flags), tiny_loaded("llama"), device())
        assert PASSWORD not in str(error.value)

    assert object_names(shared_s3, url) == []


def object_names(s3: S3, url: str) -> list[str]:
    found = s3.admin("s3").list_objects_v2(Bucket=parse_url(url).host)
    return [each["Key"] for each in found.get("Contents", ())]


def test_open_store_unknown_google_token_is_refused(
    shared_google: GoogleFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = shared_google.use_bucket(monkeypatch)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", PASSWORD)

    assert PASSWORD not in denial_of(url)


def test_open_store_azure_without_an_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)

    assert "Account must be specified" in denial_of("az://container/prefix")


@pytest.mark.parametrize("command", ["getrange", "set", "strlen", "pexpire", "del"])
def test_open_store_valkey_user_without_a_command_is_refused(shared_valkey: Valkey, command: str) -> None:
    client = shared_valkey.client
    client.flushall()
    rules = (f">{PASSWORD}", "on", "~kvstrata2:*", "+@all", f"-{command}")
    client.execute_command("ACL", "SETUSER", "someone", "reset", *rules)

    assert PASSWORD not in denial_of(f"redis://someone:{PASSWORD}@127.0.0.1:{shared_valkey.port}/0")
    assert client.dbsize() == 0


def test_open_store_valkey_user_with_other_keys_is_refused(shared_valkey: Valkey) -> None:
    client = shared_valkey.client
    client.flushall()
    client.execute_command("ACL", "SETUSER", "someone", "reset", f">{PASSWORD}", "on", "~other:*", "+@all")

    assert PASSWORD not in denial_of(f"redis://someone:{PASSWORD}@127.0.0.1:{shared_valkey.port}/0")
    assert client.dbsize() == 0


def test_build_server_with_another_secret_is_refused_and_changes_nothing(redis_url: str, tmp_path: Path) -> None:
    """Whole servers are started. The failed one leaves the store unchanged."""
    import redis

    flags = {"remote_cache": redis_url, "remote_secret_file": secret_file(tmp_path)}
    build_server(load(flags=flags), tiny_loaded("llama"), device()).engine.stop()
    client = redis.Redis.from_url(redis_url)
    held = {key: client.get(key) for key in client.scan_iter()}
    other = {**flags, "remote_secret_file": secret_file(tmp_path, b"y" * 40, "other")}
    with pytest.raises(ConfigError, match="is used by servers with another secret") as error:
        build_server(load(flags=other), tiny_loaded("llama"), device())

    assert "yyyy" not in str(error.value)
    assert {key: client.get(key) for key in client.scan_iter()} == held
    client.close()
