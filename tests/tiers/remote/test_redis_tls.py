"""rediss:// against a server with TLS: accepted certificates, and errors for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.remote.open_store import open_store
from kvstrata.tiers.remote.sealing import keys_of
from kvstrata.tiers.remote.tier import RemoteTier
from kvstrata.tiers.remote.url import parse_url
from tests.tiers.disk.blocks import all_same
from tests.tiers.remote.chains import longest_chain, put_chain, random_ids, read_all
from tests.tiers.remote.stores import SECRET, Valkey, open_remote, secret_file
from tests.tiers.remote.tls import Authority, Certificate, TlsFront

Fronts = Callable[..., TlsFront]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def front(shared_valkey: Valkey) -> Iterator[Fronts]:
    """Make TLS fronts of an empty Valkey."""
    shared_valkey.client.flushall()
    with ExitStack() as stack:

        def make(certificate: Certificate, client_authority: Authority | None = None) -> TlsFront:
            made = TlsFront(shared_valkey.port, certificate, client_authority)
            stack.callback(made.close)
            return made

        yield make


def refusal_of(url: str, valkey: Valkey, reason: str = "tls") -> str:
    """Return the error of opening a store, which wrote nothing."""
    with pytest.raises(ConfigError, match=rf"cannot be used \({reason}\)") as error:
        open_store(parse_url(url), keys_of(SECRET))
    assert valkey.client.dbsize() == 0
    return str(error.value)


def assert_opens(url: str, valkey: Valkey) -> None:
    open_store(parse_url(url), keys_of(SECRET)).close()
    assert valkey.client.dbsize() == 1
    valkey.client.flushall()


def test_tier_over_tls_reads_written_blocks(front: Fronts, authority: Authority, tmp_path: Path) -> None:
    made = front(authority.make_certificate("valkey", "127.0.0.1"))
    url = f"rediss://127.0.0.1:{made.port}/0?ssl_ca_certs={authority.file}"
    first, second = (open_remote(url, secret_file(tmp_path)) for _ in range(2))
    ids = random_ids(31, 1024)
    put = put_chain(first, ids)
    num_bytes = made.num_bytes

    assert longest_chain(second, ids).num_tokens == 1024
    came = read_all(second, [block.id for block in put])
    assert all_same(came, put)
    assert made.num_bytes - num_bytes > sum(block.nbytes for block in put)
    assert first.shared_usage().place == f"rediss://127.0.0.1:{made.port}/0"
    _close(first, second)


def _close(*tiers: RemoteTier) -> None:
    for each in tiers:
        each.close()


def test_open_store_certificate_of_an_unknown_authority_is_refused(
    front: Fronts, authority: Authority, shared_valkey: Valkey, tmp_path: Path
) -> None:
    made = front(Authority(tmp_path, "stranger").make_certificate("valkey", "127.0.0.1"))
    place = f"rediss://127.0.0.1:{made.port}/0"

    for url in (f"{place}?ssl_ca_certs={authority.file}", place):
        said = refusal_of(url, shared_valkey)
        assert "CERTIFICATE_VERIFY_FAILED" in said
        assert "ssl_ca_certs" in said


def test_open_store_certificate_of_another_host_is_refused_unless_unchecked(
    front: Fronts, authority: Authority, shared_valkey: Valkey
) -> None:
    made = front(authority.make_certificate("elsewhere", "cache.example"))
    url = f"rediss://127.0.0.1:{made.port}/0?ssl_ca_certs={authority.file}"

    assert "CERTIFICATE_VERIFY_FAILED" in refusal_of(url, shared_valkey)
    assert "CERTIFICATE_VERIFY_FAILED" in refusal_of(f"{url}&ssl_check_hostname=true", shared_valkey)
    assert_opens(f"{url}&ssl_check_hostname=false", shared_valkey)


def test_open_store_expired_certificate_is_refused(front: Fronts, authority: Authority, shared_valkey: Valkey) -> None:
    made = front(authority.make_certificate("old", "127.0.0.1", is_expired=True))

    assert "expired" in refusal_of(f"rediss://127.0.0.1:{made.port}/0?ssl_ca_certs={authority.file}", shared_valkey)


def test_open_store_without_a_required_client_certificate_is_refused(
    front: Fronts, authority: Authority, shared_valkey: Valkey
) -> None:
    made = front(authority.make_certificate("valkey", "127.0.0.1"), authority)
    own = authority.make_certificate("client")
    url = f"rediss://127.0.0.1:{made.port}/0?ssl_ca_certs={authority.file}"

    # Redis states the reason; this front may only close the connection.
    refusal_of(url, shared_valkey, "(tls|unreachable)")
    assert_opens(f"{url}&ssl_certfile={own.file}&ssl_keyfile={own.key_file}", shared_valkey)


def test_open_store_server_without_tls_is_refused(shared_valkey: Valkey) -> None:
    """Valkey takes the TLS handshake for an unfinished command and waits, so the reason is a timeout."""
    shared_valkey.client.flushall()
    said = refusal_of(f"rediss://127.0.0.1:{shared_valkey.port}/0", shared_valkey, "timeout")

    assert "whether it speaks TLS" in said


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"])
def test_open_store_missing_tls_file_is_named(option: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=rf"{option} names /no/such/file, which cannot be read"):
        open_store(parse_url(f"rediss://127.0.0.1:1/0?{option}=/no/such/file"), keys_of(SECRET))
