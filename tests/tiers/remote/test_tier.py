"""The remote tier on real stores: writes, lookups, reads, limits and pauses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvstrata.tiers.block import CHECKPOINT, BlockId
from kvstrata.tiers.interface import Refusal, Refused, TierMatch
from kvstrata.tiers.lookups import run_walk
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock
from kvstrata.tiers.remote.tier import RemoteTier
from kvstrata.tiers.remote.url import parse_url
from tests.support.eventually import eventually
from tests.tiers.disk.blocks import OTHER_ROOT, all_same
from tests.tiers.remote.chains import block_at, longest_chain, missing_chain, put_chain, random_ids, read_all
from tests.tiers.remote.stores import Valkey, open_remote, secret_file


@pytest.mark.parametrize("is_sealed", [True, False])
def test_read_blocks_of_another_server_returns_them(store_url: str, tmp_path: Path, is_sealed: bool) -> None:
    if not is_sealed and parse_url(store_url).needs_secret:
        pytest.skip("blocks are sealed there")
    secret = secret_file(tmp_path) if is_sealed else None
    first, second = open_remote(store_url, secret), open_remote(store_url, secret)
    ids = random_ids(1, 5 * 256 + 100)
    put = put_chain(first, ids, marks=(512, 1024))
    match = longest_chain(second, ids)

    assert [link.end for link in match.links] == [256, 512, 768, 1024, 1280]
    assert all(link.nbytes for link in match.links)
    came = read_all(second, [block.id for block in put])
    assert all_same(came, put)
    at_mark = longest_chain(second, ids, at_marks=True)
    assert (at_mark.num_tokens, at_mark.mark_bytes > 0) == (1024, True)
    assert missing_chain(second, ids, (512,)).links == () == missing_chain(second, ids, (512,)).marks
    for tier in (first, second):
        tier.close()


def test_longest_chain_with_a_lost_block_ends_before_it(store_url: str) -> None:
    tier = open_remote(store_url)
    ids = random_ids(2, 6 * 256)
    put = put_chain(tier, ids)
    tier.block_store.store.delete([tier.block_store.names.name_of(put[2].id)])
    read_all(tier, [put[2].id])

    assert longest_chain(tier, ids).num_tokens == 512
    assert [link.start for link in missing_chain(tier, ids).links] == [512, 768, 1024, 1280]
    put_chain(tier, ids)
    assert longest_chain(tier, ids).num_tokens == 6 * 256
    tier.close()


@pytest.mark.parametrize(
    "other",
    [{"backend": "metal"}, {"precision": "planes:4"}],
)
def test_longest_chain_of_another_backend_or_precision_is_empty(redis_url: str, other: dict) -> None:
    tier, stranger = open_remote(redis_url), open_remote(redis_url, **other)
    ids = random_ids(3, 1024)
    put_chain(tier, ids)

    assert longest_chain(stranger, ids) == TierMatch()
    assert longest_chain(tier, ids, root=OTHER_ROOT) == TierMatch()
    assert longest_chain(tier, ids).num_tokens == 1024
    for each in (tier, stranger):
        each.close()


def test_read_damaged_block_deletes_it_and_a_put_writes_it_again(server: Valkey, tmp_path: Path) -> None:
    tier = open_remote(server.url, secret_file(tmp_path))
    ids = random_ids(7, 768)
    put = put_chain(tier, ids)
    name = f"kvstrata2:{tier.block_store.names.name_of(put[1].id)}"
    server.client.set(name, b"forged")
    (came,) = read_all(tier, [put[1].id])

    assert isinstance(came, MissingBlock)
    assert came.reason == "seal"
    tier.flush(5.0)
    assert not server.client.exists(name)
    put_chain(tier, ids)
    assert longest_chain(tier, ids).num_tokens == 768
    tier.close()


def test_read_block_above_the_limit_deletes_it_unread(store_url: str, tmp_path: Path) -> None:
    tier = open_remote(store_url, secret_file(tmp_path), max_block_bytes=1 << 10)
    ids = random_ids(9, 512)
    put = put_chain(tier, ids)
    name = tier.block_store.names.name_of(put[1].id)
    tier.block_store.store.delete([name])
    assert tier.block_store.store.create(name, bytes(6 << 20), 60.0)
    (came,) = read_all(tier, [put[1].id])

    assert isinstance(came, MissingBlock)
    assert came.reason == "size"
    assert tier.usage().counters["read"] == {}
    tier.flush(5.0)
    assert tier.block_store.store.sizes([name]) == [0]
    assert isinstance(read_all(tier, [put[0].id])[0], LoadedBlock)
    tier.close()


@pytest.mark.perf
def test_longest_chain_among_many_blocks_takes_two_round_trips(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    client = server.client
    with client.pipeline(transaction=False) as pipeline:
        for number in range(100_000):
            pipeline.set(f"kvstrata2:{number:064x}", b"x")
            if number % 10_000 == 9_999:
                pipeline.execute()
    tier = open_remote(server.url)
    ids = random_ids(8, 400 * 256)
    put_chain(tier, ids, marks=(256, 101_376))
    executed: list[Any] = []
    pipeline_type = pytest.importorskip("redis").client.Pipeline
    execute = pipeline_type.execute
    monkeypatch.setattr(pipeline_type, "execute", lambda pipeline: executed.append(1) or execute(pipeline))
    began_s = time.perf_counter()
    match = run_walk(tier.blocks.longest_chain(bytes(range(32)), 0, ids, at_marks=True))
    seconds = time.perf_counter() - began_s

    assert client.dbsize() > 100_400
    assert match.num_tokens == 101_376
    assert 1 <= len(executed) <= 2
    assert seconds < 2.0
    tier.close()


def test_touch_extends_the_ttl_of_every_block(server: Valkey) -> None:
    tier = open_remote(server.url, ttl_s=100.0)
    ids = random_ids(9, 1024)
    put = put_chain(tier, ids, (1024,))
    names = [f"kvstrata2:{tier.block_store.names.name_of(block.id)}" for block in put]
    for name in names:
        server.client.expire(name, 5)
    tier.touch(BlockId(block.key, part) for block in put for part in ("base", CHECKPOINT))
    tier.flush(5.0)

    assert [server.client.ttl(name) > 50 for name in names] == [True] * 5
    tier.close()


def test_put_above_a_write_limit_is_refused_with_its_reason(redis_url: str) -> None:
    ids = random_ids(10, 1024)
    plain = open_remote(redis_url)
    missing = missing_chain(plain, ids)
    block = block_at(missing.links[0], missing.root, ids)
    plain.close()
    frugal = open_remote(redis_url, daily_write_bytes=block.nbytes // 2)
    assert frugal.put(block) == Refused(Refusal.WRITE_BUDGET)
    assert frugal.usage().written_bytes == 0
    frugal.close()
    hasty = open_remote(redis_url, queue_bytes=1)
    blocks = [block_at(link, missing.root, ids, num_values=500_000) for link in missing.links]
    answers = [hasty.put(block) for block in blocks]
    assert Refused(Refusal.QUEUE_FULL) in answers
    assert hasty.usage().counters["refused"] == {"queue_full": answers.count(Refused(Refusal.QUEUE_FULL))}
    hasty.close()
    assert hasty.put(block) == Refused(Refusal.CLOSED)


def _refused_while_paused(tier: RemoteTier, ids_seed: int) -> None:
    ids = random_ids(ids_seed, 256)
    began_s = time.perf_counter()
    assert longest_chain(tier, ids) == TierMatch()
    assert time.perf_counter() - began_s < 0.5, "a store that is left alone is not asked"


def test_tier_unreachable_store_pauses_reads_and_writes(server: Valkey) -> None:
    tier = open_remote(server.url, first_pause_s=5.0, longest_pause_s=5.0)
    ids = random_ids(11, 1024)
    put = put_chain(tier, ids)
    server.kill()
    assert all(isinstance(came, MissingBlock) for came in read_all(tier, [block.id for block in put]))

    assert tier.usage().paused_because == "unreachable"
    _refused_while_paused(tier, 12)
    missing = missing_chain(tier, ids)
    assert not missing.is_known
    assert tier.put(put[0]) == Refused(Refusal.PAUSED)
    assert tier.usage().counters["failed"]["unreachable"] >= 1
    tier.close()


def test_tier_hanging_store_is_queried_again_after_a_pause(server: Valkey) -> None:
    tier = open_remote(server.url, first_pause_s=0.2, longest_pause_s=0.2)
    ids = random_ids(13, 512)
    put_chain(tier, ids)
    server.hang()
    assert longest_chain(tier, ids) == TierMatch()
    assert tier.usage().paused_because == "timeout"
    server.resume()
    eventually(lambda: not tier.is_paused)
    assert longest_chain(tier, ids).num_tokens == 512
    assert tier.usage().paused_because == ""
    tier.close()


@pytest.mark.parametrize("reason", ["full", "read_only", "denied"])
def test_tier_unwritable_store_pauses_writes_and_keeps_reads(server: Valkey, reason: str) -> None:
    tier = open_remote(server.url, first_pause_s=5.0, longest_pause_s=5.0)
    ids, more = random_ids(14, 512), random_ids(15, 256)
    put = put_chain(tier, ids)
    if reason == "full":
        server.client.config_set("maxmemory", 1)
    elif reason == "read_only":
        server.client.replicaof("127.0.0.1", 1)
    else:
        server.client.execute_command("ACL", "SETUSER", "default", "-set")
    missing = missing_chain(tier, more)
    tier.put(block_at(missing.links[0], missing.root, more))
    eventually(lambda: tier.usage().counters["failed"].get(reason, 0) == 1)

    assert tier.usage().paused_because == reason
    assert tier.usage().counters["dropped"] == {"fault": 1}
    if reason != "denied":
        assert all(isinstance(came, LoadedBlock) for came in read_all(tier, [block.id for block in put]))
    tier.close()
