"""Secrets, and the names and seals derived from them."""

from __future__ import annotations

import random
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

KEYS = keys_of(SECRET)
PLAIN = Keys(KEYS.names, None)


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
def test_keys_for_shared_store_without_a_secret_is_refused(text: str) -> None:
    url = parse_url(text)

    assert url.needs_secret
    with pytest.raises(ConfigError, match="--remote-secret-file"):
        keys_for(url, None)


def test_keys_for_private_folder_without_a_secret_is_accepted(tmp_path: Path) -> None:
    url = parse_url(f"file://{tmp_path}")
    tmp_path.chmod(0o700)
    assert not url.needs_secret
    assert keys_for(url, None).seal is None

    tmp_path.chmod(0o750)
    assert url.needs_secret
    tmp_path.chmod(0o700)


def test_read_secret_short_or_public_file_is_refused(tmp_path: Path) -> None:
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


def test_block_names_differ_by_key_part_precision_and_secret() -> None:
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
def test_links_of_two_prompts_share_whole_blocks_up_to_the_first_difference(length: int, shared: int) -> None:
    ids = np.arange(length, dtype=np.int32)
    others = ids.copy()
    others[shared:] += 1
    ours, theirs = links_of(chain, ROOT, ids), links_of(chain, ROOT, others)

    assert [(link.start, link.end) for link in ours] == [(at, at + 256) for at in range(0, length - 255, 256)]
    same = sum(a.key == b.key for a, b in zip(ours, theirs, strict=True))
    assert same == min(shared, length) // 256


@pytest.mark.parametrize("keys", [KEYS, PLAIN])
@pytest.mark.parametrize("size", [0, 1, sealing.PIECE_BYTES - 1, sealing.PIECE_BYTES, 2 * sealing.PIECE_BYTES + 5])
def test_unseal_under_another_name_or_key_is_damage(keys: Keys, size: int) -> None:
    pytest.importorskip("cryptography")
    body = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    sealed = bytes(sealing.seal(keys, "name", body))

    assert bytes(sealing.unseal(keys, "name", sealed)) == body
    with pytest.raises(DamagedBlock):
        sealing.unseal(keys, "other", sealed)
    with pytest.raises(DamagedBlock):
        sealing.unseal(replace(keys, seal=bytes(32)), "name", sealed)


def test_unseal_missing_or_swapped_pieces_is_damage() -> None:
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


@pytest.mark.parametrize(
    "num_bytes", [0, 1, sealing.PIECE_BYTES - 1, sealing.PIECE_BYTES, sealing.PIECE_BYTES + 1, 2 * sealing.PIECE_BYTES]
)
@pytest.mark.parametrize("keys", [Keys(b"", None), Keys(b"", bytes(32))], ids=["plain", "sealed"])
def test_unseal_returns_sealed_bodies_of_any_length(keys: Keys, num_bytes: int) -> None:
    body = random.Random(num_bytes).randbytes(num_bytes)
    sealed = bytes(sealing.seal(keys, "name", body))
    assert sealing.unseal(keys, "name", sealed) == body
    with pytest.raises(DamagedBlock):
        sealing.unseal(keys, "name", sealed[:-1])
