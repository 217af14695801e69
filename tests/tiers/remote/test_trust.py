"""URLs, secrets, names and seals: who is trusted, and what is never shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import CHECKPOINT, BlockId
from kvstrata.tiers.block_file import DamagedBlock
from kvstrata.tiers.remote import sealing
from kvstrata.tiers.remote.sealing import BlockNames, Keys, is_name, keys_for, keys_of, links_of, read_secret
from kvstrata.tiers.remote.url import parse_url
from tests.tiers.disk.blocks import ROOT
from tests.tiers.remote.stores import SECRET, secret_file

PASSWORD = "hunter2-very-secret"
KEYS = keys_of(SECRET)
PLAIN = Keys(KEYS.names, None)


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
def test_a_url_is_shown_without_its_password(text: str, shown: str) -> None:
    url = parse_url(text)

    assert url.shown == str(url) == shown
    assert PASSWORD not in repr(url)


def test_a_password_may_be_the_name_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_url_that_makes_no_sense_is_refused_and_not_repeated(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as error:
        parse_url(text)

    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "redis://127.0.0.1/0",
        "redis://localhost/0",
        "rediss://[::1]:1/0",
        "redis://10.0.0.1/0",
        "s3://bucket?endpoint=http://127.0.0.1:9000",
        "s3://bucket",
        "gs://bucket?endpoint=http://127.0.0.1:1",
        "gs://bucket",
        "az://container?endpoint=http://[::1]:1/account",
        "az://container",
    ],
)
def test_a_store_that_other_users_reach_needs_a_secret(text: str) -> None:
    url = parse_url(text)

    assert url.needs_secret
    with pytest.raises(ConfigError, match="--remote-secret-file"):
        keys_for(url, None)


def test_a_folder_needs_no_secret_if_it_is_this_users_alone(tmp_path: Path) -> None:
    url = parse_url(f"file://{tmp_path}")
    tmp_path.chmod(0o700)
    assert not url.needs_secret
    assert keys_for(url, None).seal is None

    tmp_path.chmod(0o750)
    assert url.needs_secret
    tmp_path.chmod(0o700)


def test_a_secret_is_long_and_not_for_everyone(tmp_path: Path) -> None:
    assert read_secret(secret_file(tmp_path, SECRET + b"\n")) == SECRET
    with pytest.raises(ConfigError, match="has 31 bytes"):
        read_secret(secret_file(tmp_path, SECRET[:-1] + b"\n"))
    open_to_all = secret_file(tmp_path, name="open")
    open_to_all.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(open_to_all)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "none")
    assert SECRET.decode() not in repr(keys_of(SECRET))


def test_names_differ_by_all_that_decides_what_a_block_is() -> None:
    key, other = chain(ROOT, [1]), chain(ROOT, [2])
    names = BlockNames(KEYS, "planes:8", "cpu")
    others = [
        names.name_of(BlockId(other)),
        names.name_of(BlockId(key, CHECKPOINT)),
        BlockNames(KEYS, "planes:4", "cpu").name_of(BlockId(key)),
        BlockNames(keys_of(SECRET[::-1]), "planes:8", "cpu").name_of(BlockId(key)),
    ]

    assert len({names.name_of(BlockId(key)), *others}) == 5
    assert all(is_name(name) for name in others)
    assert names.name_of(BlockId(key)) == BlockNames(KEYS, "planes:8", "metal").name_of(BlockId(key))
    assert names.root_of(ROOT) != BlockNames(KEYS, "planes:8", "metal").root_of(ROOT), "the back-end is in the root"


@given(length=st.integers(0, 2000), shared=st.integers(0, 2000))
def test_a_chain_has_whole_runs_of_256_tokens_and_parts_where_the_tokens_do(length: int, shared: int) -> None:
    ids = np.arange(length, dtype=np.int32)
    others = ids.copy()
    others[shared:] += 1
    ours, theirs = links_of(chain, ROOT, ids), links_of(chain, ROOT, others)

    assert [(link.start, link.end) for link in ours] == [(at, at + 256) for at in range(0, length - 255, 256)]
    same = sum(a.key == b.key for a, b in zip(ours, theirs, strict=True))
    assert same == min(shared, length) // 256


@pytest.mark.parametrize("keys", [KEYS, PLAIN])
@pytest.mark.parametrize("size", [0, 1, sealing.PIECE_BYTES - 1, sealing.PIECE_BYTES, 2 * sealing.PIECE_BYTES + 5])
def test_what_was_sealed_opens_under_its_name_alone(keys: Keys, size: int) -> None:
    pytest.importorskip("cryptography")
    body = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    sealed = bytes(sealing.seal(keys, "name", body))

    assert bytes(sealing.unseal(keys, "name", sealed)) == body
    with pytest.raises(DamagedBlock):
        sealing.unseal(keys, "other", sealed)
    with pytest.raises(DamagedBlock):
        sealing.unseal(replace(keys, seal=bytes(32)), "name", sealed)


def test_pieces_cannot_be_cut_off_or_swapped() -> None:
    pytest.importorskip("cryptography")
    body = bytes(3 * sealing.PIECE_BYTES)
    sealed = bytes(sealing.seal(KEYS, "name", body))
    head = len(sealing.SEALED) + sealing.SALT_BYTES
    step = sealing.PIECE_BYTES + sealing.TAG_BYTES
    pieces = [sealed[head + i * step : head + (i + 1) * step] for i in range(3)]

    for wrong in (pieces[:2], pieces[1:], [pieces[1], pieces[0], pieces[2]], [*pieces, pieces[2]], [pieces[0]], []):
        with pytest.raises(DamagedBlock):
            sealing.unseal(KEYS, "name", sealed[:head] + b"".join(wrong))
    assert bytes(sealed).count(bytes(64)) == 0, "encrypted"
