"""URLs of stores: accepted forms, refused ones, and passwords that are never shown."""

from __future__ import annotations

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.remote.url import parse_url

PASSWORD = "hunter2-very-secret"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"redis://user:{PASSWORD}@cache.example:6379/2", "redis://cache.example:6379/2"),
        (f"rediss://:{PASSWORD}@[::1]:6380/0?ssl_ca_certs=/ca.pem", "rediss://[::1]:6380/0"),
        ("s3://bucket/some/prefix?region=eu-west-1", "s3://bucket/some/prefix"),
        ("gs://bucket", "gs://bucket"),
        ("az://container/prefix", "az://container/prefix"),
        ("file:///shared/folder", "file:///shared/folder"),
    ],
)
def test_url_is_shown_without_its_password(text: str, shown: str) -> None:
    url = parse_url(text)

    assert url.shown == str(url) == shown
    assert PASSWORD not in repr(url)


def test_url_password_variable_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    url = parse_url("redis://me:${KV_TEST_PASSWORD}@cache.example:6379/2")
    assert not url.has_plain_password
    assert parse_url(f"redis://:{PASSWORD}@cache.example").has_plain_password
    monkeypatch.setenv("KV_TEST_PASSWORD", "p@ss/${HOME}")
    assert url.with_login == "redis://me:p%40ss%2F%24%7BHOME%7D@cache.example:6379/2"
    monkeypatch.delenv("KV_TEST_PASSWORD")
    with pytest.raises(ConfigError, match="KV_TEST_PASSWORD, which is not set"):
        _ = url.with_login
    assert parse_url("redis://cache.example/0").with_login == "redis://cache.example/0"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"memcached://user:{PASSWORD}@host", "unknown scheme 'memcached'"),
        (f"redis://:{PASSWORD}@host:port/0", "port"),
        (f"redis://:{PASSWORD}@/0", "needs a host"),
        (f"redis://:{PASSWORD}@host/db", "number of a database"),
        (f"redis://:{PASSWORD}@host/0?retry=1", "no option"),
        (f"s3://key:{PASSWORD}@bucket", "takes no user and password"),
        ("s3:///prefix", "needs a bucket"),
        ("file://host/folder", "three slashes"),
        ("file:///", "three slashes"),
        (f"{PASSWORD}", "unknown scheme"),
        (f"redis://[{PASSWORD}/0", "not a URL"),
        (f"s3://bucket?endpoint=http://user:{PASSWORD}@host", "without a user and a password"),
        (f"gs://bucket?endpoint={PASSWORD}", "written like https://host:9000"),
        (f"az://container?endpoint=http://[{PASSWORD}", "written like https://host:9000"),
        (f"rediss://:{PASSWORD}@host/0?ssl_check_hostname=maybe", "true or false"),
        (f"rediss://:{PASSWORD}@host/0?ssl_cert_reqs=none", "no option"),
    ],
)
def test_parse_url_invalid_text_is_refused_and_not_repeated(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as error:
        parse_url(text)

    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "ssl_min_version=769", "ssl_ciphers=NULL"])
def test_parse_url_option_that_weakens_tls_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="no option"):
        parse_url(f"rediss://127.0.0.1:1/0?{option}")
