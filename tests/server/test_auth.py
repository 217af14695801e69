"""Keys: who may come in, and whose cached state is whose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from kvstrata.config import load
from kvstrata.prefix_cache.keys import owner_of
from kvstrata.server.http.access import SCOPE_KEY, ApiKey, RequireKey, owner_of_scope, salt_of
from kvstrata.server.options import api_keys
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# ours\nsecret-b\n\nsecret-c\n")
    file.chmod(0o600)
    with running(tiny_loaded("llama"), api_key=["secret-a"], api_key_file=file) as one:
        yield one


@pytest.mark.parametrize("key", ["secret-a", "secret-b", "secret-c"])
def test_keys_of_flag_and_file(locked: Served, key: str) -> None:
    with locked.openai(key) as client:
        assert client.models.list().data[0].id == locked.name


@pytest.mark.parametrize("sent", ["Bearer secret", "Bearer secret-aa", "Bearer # ours", "Basic secret-a", "secret-a"])
def test_anything_else_is_401(locked: Served, sent: str) -> None:
    with locked.http() as http:
        response = http.get("/v1/models", headers={"authorization": sent})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_client_sees_an_authentication_error(locked: Served) -> None:
    with locked.openai("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model=locked.name, prompt="a")


def test_only_health_and_the_page_are_open(locked: Served) -> None:
    with locked.http() as http:
        for path in ("/health", "/", "/dashboard/main.js"):
            assert http.get(path).status_code == 200, path
        for path in (
            "/cache/usage",
            "/dashboard/other.js",
            "/v1/models",
            "/metrics",
            "/props",
            "/openapi.json",
            "/nothing",
        ):
            assert http.get(path).status_code == 401, path


def test_each_key_has_a_salt_of_its_own() -> None:
    a, b = ApiKey.of("a"), ApiKey.of("b")
    assert a == ApiKey.of("a")
    assert a.salt != b.salt
    assert a.salt != a.digest.hex()


def test_salts_divide_further_and_never_meet() -> None:
    nobody, a, b = {}, {SCOPE_KEY: ApiKey.of("a")}, {SCOPE_KEY: ApiKey.of("b")}
    assert salt_of(nobody, None) == salt_of(nobody, "") == ""
    assert salt_of(a, None) == a[SCOPE_KEY].salt
    salts = [salt_of(scope, salt) for scope in (nobody, a, b) for salt in (None, "x", "y", a[SCOPE_KEY].salt)]
    assert len(set(salts)) == len(salts)


def test_an_owner_has_all_its_salts_and_no_other() -> None:
    plain, admin = {SCOPE_KEY: ApiKey.of("a")}, {SCOPE_KEY: ApiKey.of("b", is_admin=True)}
    assert owner_of_scope({}) is owner_of_scope(admin) is None
    assert owner_of_scope(plain) == ApiKey.of("a").salt
    assert {owner_of(salt_of(plain, salt)) for salt in (None, "x", ":", "x:y")} == {owner_of_scope(plain)}
    assert owner_of(salt_of({}, "x")) == owner_of(salt_of({}, None)) == ""


def test_a_key_of_both_kinds_is_an_admin_s(tmp_path: Path) -> None:
    file = tmp_path / "admins"
    file.write_text("boss\n")
    file.chmod(0o600)
    settings = load(flags={"api_key": ["boss", "worker"], "admin_key_file": str(file)})
    door = RequireKey(lambda *_: None, api_keys(settings))  # pyright: ignore[reportArgumentType]
    found = {key: door._match(key.encode()) for key in ("boss", "worker", "nobody")}
    assert {key: one and one.is_admin for key, one in found.items()} == {"boss": True, "worker": False, "nobody": None}
