"""Real stores: one shared server of each kind for tests that do not reconfigure or stop it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.remote.cloud_emulators import Azurite, GoogleFront
from tests.tiers.remote.stores import S3, Valkey, private_folder, valkey


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[Valkey]:
    with valkey() as running:
        yield running


@pytest.fixture(scope="session")
def shared_s3() -> Iterator[S3]:
    server = S3()
    yield server
    server.close()


@pytest.fixture(scope="session")
def shared_google(shared_s3: S3) -> Iterator[GoogleFront]:
    front = GoogleFront(shared_s3)
    yield front
    front.close()


@pytest.fixture(scope="session")
def shared_azure() -> Iterator[Azurite]:
    server = Azurite()
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A Valkey server of this test alone, which it may stop and reconfigure."""
    with valkey() as running:
        yield running


@pytest.fixture
def redis_url(shared_valkey: Valkey) -> str:
    shared_valkey.client.flushall()
    return shared_valkey.url


@pytest.fixture(params=["redis", "s3", "google", "azure", "file"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "redis":
        return request.getfixturevalue("redis_url")
    if request.param == "file":
        return private_folder(tmp_path)
    return request.getfixturevalue(f"shared_{request.param}").use_bucket(monkeypatch)
