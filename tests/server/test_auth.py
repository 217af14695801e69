"""Keys: who may come in, and whose cached state is whose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from kvstrata.server.auth import SCOPE_KEY, ApiKey, salt_of
from tests.server.conftest import Served


def test_keys_of_flag_and_file(serve: Callable[..., Served], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsecret-b\n\nsecret-c\n")
    served = serve(api_key=["secret-a"], api_key_file=file)
    for key in ("secret-a", "secret-b", "secret-c"):
        assert served.openai(key).models.list().data[0].id == served.name
    for key in ("secret", "secret-aa", "# ours"):
        with served.http() as http:
            response = http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        served.openai("wrong").models.list()


def test_only_health_is_open(serve: Callable[..., Served]) -> None:
    served = serve(api_key=["secret"])
    with served.http() as http:
        assert http.get("/health").status_code == 200
        for path in ("/", "/v1/models", "/metrics", "/props", "/openapi.json", "/docs", "/nothing"):
            assert http.get(path).status_code == 401, path
        assert http.get("/v1/models", headers={"authorization": "Basic secret"}).status_code == 401
        assert http.get("/v1/models", headers={"authorization": "bearer secret"}).status_code == 200


def test_each_key_has_a_salt_of_its_own() -> None:
    a, b = ApiKey.of("a"), ApiKey.of("b")
    assert a == ApiKey.of("a")
    assert a.salt != b.salt
    assert a.salt != a.digest.hex()


def test_salts_divide_further_and_never_meet() -> None:
    nobody, a = {}, {SCOPE_KEY: ApiKey.of("a").salt}
    b = {SCOPE_KEY: ApiKey.of("b").salt}
    assert salt_of(nobody, None) == salt_of(nobody, "") == ""
    assert salt_of(a, None) == a[SCOPE_KEY]
    salts = [salt_of(scope, salt) for scope in (nobody, a, b) for salt in (None, "x", "y", a[SCOPE_KEY])]
    assert len(set(salts)) == len(salts)
