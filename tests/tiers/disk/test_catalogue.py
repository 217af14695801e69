"""The catalogue: fast starts, and no lost blocks without it."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstrata.tiers.block import BlockId
from kvstrata.tiers.block_file import Damage
from kvstrata.tiers.disk.catalogue import BLOCK_FORMAT, Catalogue, CatalogueFault, open_catalogue
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.disk.folder import file_name
from kvstrata.tiers.disk.index import BlockRecord
from tests.tiers.disk.blocks import (
    ROOT,
    delete_catalogue,
    is_same,
    make_chain,
    open_tier,
    path_of,
    put_all,
    read_now,
    real_bytes,
    records_of,
)
from tests.tiers.disk.faults import FaultyFiles, flip


def write_chain(directory: Path, num_blocks: int = 12) -> list:
    tier = open_tier(directory)
    blocks = make_chain(num_blocks)
    put_all(tier, blocks)
    tier.close()
    return blocks


def assert_all_there(directory: Path, blocks: list) -> None:
    tier = open_tier(directory)
    assert tier.flush(20).is_empty
    assert all(tier.blocks.find(block.key) for block in blocks)
    assert tier.blocks.lengths(blocks[3].key) == (4,)
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in blocks)
    assert tier.usage().num_blocks == len(blocks)
    assert tier.usage().disk_bytes == real_bytes(directory)
    tier.close()


@pytest.mark.parametrize("suffixes", [("", "-wal", "-shm"), ("",)])
def test_catalogue_deleted_is_rebuilt(tmp_path: Path, suffixes: tuple[str, ...]) -> None:
    blocks = write_chain(tmp_path / "cache")
    for suffix in suffixes:
        (tmp_path / "cache" / f"catalogue.sqlite{suffix}").unlink(missing_ok=True)
    assert_all_there(tmp_path / "cache", blocks)


@pytest.mark.parametrize(
    "content", [b"", b"not a database " * 1000, os.urandom(20_000), b"SQLite format 3\0" + bytes(8176)]
)
def test_catalogue_that_is_no_database_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    blocks = write_chain(tmp_path / "cache")
    (tmp_path / "cache" / "catalogue.sqlite").write_bytes(content)
    assert_all_there(tmp_path / "cache", blocks)


def test_catalogue_of_another_version_is_rebuilt(tmp_path: Path) -> None:
    blocks = write_chain(tmp_path / "cache")
    connection = sqlite3.connect(tmp_path / "cache" / "catalogue.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert_all_there(tmp_path / "cache", blocks)


def test_catalogue_with_foreign_tables_is_rebuilt(tmp_path: Path) -> None:
    blocks = write_chain(tmp_path / "cache")
    path = tmp_path / "cache" / "catalogue.sqlite"
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE books (title TEXT)")
    connection.close()
    assert_all_there(tmp_path / "cache", blocks)
    connection = sqlite3.connect(path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert names == {"blocks", "properties"}


def test_catalogue_with_flipped_bits_never_serves_wrong_blocks(tmp_path: Path) -> None:
    """SQLite has no checksums, so a row may be wrong. That may cost a block, but never serves a wrong one."""
    blocks = write_chain(tmp_path / "cache", 6)
    path = tmp_path / "cache" / "catalogue.sqlite"
    content = path.read_bytes()
    generator = np.random.default_rng(11)
    for _ in range(60):
        path.write_bytes(content)
        for _ in range(3):
            flip(path, int(generator.integers(len(content))), 1 << int(generator.integers(8)))
        tier = open_tier(tmp_path / "cache")
        tier.blocks.lengths(ROOT)
        records_of(tier)
        assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in blocks)
        tier.close()


def test_rebuild_reads_headers_only(tmp_path: Path) -> None:
    class Counting(Filesystem):
        num_bytes = 0

        def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
            self.num_bytes += buffer.nbytes
            return super().read_into(fd, buffer, offset)

    blocks = write_chain(tmp_path / "cache")
    delete_catalogue(tmp_path / "cache")
    files = Counting()
    for num_bytes in (4096 * len(blocks), 0):
        files.num_bytes = 0
        tier = open_tier(tmp_path / "cache", files=files)
        assert tier.flush(20).is_empty
        tier.close()
        assert files.num_bytes == num_bytes


def test_rebuild_quarantines_damaged_headers(tmp_path: Path) -> None:
    blocks = write_chain(tmp_path / "cache")
    delete_catalogue(tmp_path / "cache")
    flip(path_of(tmp_path / "cache", blocks[4]), 900)
    os.truncate(path_of(tmp_path / "cache", blocks[5]), 4200)
    tier = open_tier(tmp_path / "cache")
    assert tier.flush(20).is_empty
    assert tier.usage().counters["quarantined"] == {Damage.HEADER: 1, Damage.LENGTH: 1}
    assert tier.usage().num_blocks == len(blocks) - 2
    tier.close()


def test_start_reconciles_names_and_records(tmp_path: Path) -> None:
    """After a crash of the machine the catalogue may lack rows or have rows without files."""
    blocks = write_chain(tmp_path / "cache")
    connection = sqlite3.connect(tmp_path / "cache" / "catalogue.sqlite")
    connection.execute("DELETE FROM blocks WHERE start < 8")
    connection.commit()
    connection.close()
    path_of(tmp_path / "cache", blocks[-1]).unlink()
    (tmp_path / "cache" / "blocks" / "README").write_text("not ours")
    (path_of(tmp_path / "cache", blocks[0]).parent / "notes.txt").write_text("not ours")
    tier = open_tier(tmp_path / "cache")
    assert tier.flush(10).is_empty
    assert [bool(tier.blocks.find(block.key)) for block in blocks] == [True] * 11 + [False]
    assert tier.usage().num_blocks == 11
    tier.close()


def test_start_after_a_crash_deletes_temporaries(tmp_path: Path) -> None:
    blocks = write_chain(tmp_path / "cache")
    for number in range(3):
        (tmp_path / "cache" / "tmp" / f"{number}.tmp").write_bytes(b"half a block")
    assert_all_there(tmp_path / "cache", blocks)
    assert not list((tmp_path / "cache" / "tmp").iterdir())


def test_uses_survive_a_restart(tmp_path: Path) -> None:
    now = [1000.0]
    tier = open_tier(tmp_path / "cache", clock=lambda: now[0])
    blocks = make_chain(2)
    put_all(tier, blocks)
    now[0] = 2000.0
    for _ in range(3):
        read_now(tier, blocks[0].id, root=ROOT)
    tier.close()
    tier = open_tier(tmp_path / "cache")
    first, second = records_of(tier)
    assert (first.uses, first.last_use, first.created) == (3, 2000.0, 1000.0)
    assert (second.uses, second.last_use) == (0, 1000.0)
    tier.close()


def make_record(number: int) -> BlockRecord:
    return BlockRecord(BlockId(bytes([number]) * 32), ROOT, ROOT, 0, 4, 4096, float(number), 0, 0.0)


def test_save_and_load_records_in_both_orders(tmp_path: Path) -> None:
    catalogue = open_catalogue(tmp_path / "catalogue")
    rows = [make_record(number) for number in range(5)]
    catalogue.save(rows, [], {"day": 7})
    assert catalogue.load_newest(2) == rows[:2:-1]
    assert catalogue.load_after(None, 2) == rows[:2]
    assert catalogue.load_after(rows[1].id, 10) == rows[2:]
    used = replace(rows[0], uses=3, last_use=50.0)
    catalogue.save([used], [rows[4].id])
    assert catalogue.load_newest(10) == [used, *rows[3:0:-1]]
    assert (catalogue.read_property("day"), catalogue.read_property("other")) == (7, 0)
    catalogue.close()
    again = open_catalogue(tmp_path / "catalogue")
    assert again.load_newest(10) == [used, *rows[3:0:-1]]
    again.close()
    with pytest.raises(CatalogueFault) as fault:
        again.load_newest(1)
    assert not fault.value.damaged


def test_save_that_fails_changes_nothing_and_the_next_works(tmp_path: Path) -> None:
    catalogue = open_catalogue(tmp_path / "catalogue")
    catalogue.save([make_record(1)], [])
    connection = sqlite3.connect(tmp_path / "catalogue")
    connection.execute(
        f"CREATE TRIGGER stop BEFORE INSERT ON blocks WHEN NEW.key = x'{'03' * 32}' BEGIN "
        "SELECT RAISE(ABORT, 'not this one'); END"
    )
    connection.close()
    with pytest.raises(CatalogueFault):
        catalogue.save([make_record(2), make_record(3)], [make_record(1).id], {"day": 7})
    assert catalogue.load_newest(10) == [make_record(1)]
    assert catalogue.read_property("day") == 0
    catalogue.save([make_record(2)], [])
    assert catalogue.load_newest(10) == [make_record(2), make_record(1)]
    catalogue.close()


@pytest.mark.parametrize(
    "statement",
    [
        "PRAGMA user_version = 3",
        f"UPDATE properties SET value = 0 WHERE name = '{BLOCK_FORMAT}'",
        "DELETE FROM properties",
    ],
)
def test_open_catalogue_of_another_version_raises_other_version(tmp_path: Path, statement: str) -> None:
    open_catalogue(tmp_path / "catalogue").close()
    with sqlite3.connect(tmp_path / "catalogue") as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(CatalogueFault) as fault:
        open_catalogue(tmp_path / "catalogue")
    assert fault.value.damaged
    assert fault.value.is_other_version


def test_writer_saves_records_when_its_queue_runs_empty(tmp_path: Path) -> None:
    """After a later kill the next start therefore reads no header."""
    tier = open_tier(tmp_path / "cache")
    for block in make_chain(5):
        tier.put(block)
    assert tier.flush(10).is_empty
    with sqlite3.connect(tmp_path / "cache" / "catalogue.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM blocks").fetchone() == (5,)
    connection.close()
    tier.close()


def test_writer_saves_records_in_batches_while_its_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.tiers.disk.block_store.NUM_UNSAVED", 4)
    sizes: list[int] = []
    save = Catalogue.save

    def record_save(catalogue: Catalogue, changed: list[BlockRecord], *rest) -> None:
        sizes.append(len(changed))
        save(catalogue, changed, *rest)

    monkeypatch.setattr(Catalogue, "save", record_save)
    has_come, go_on = threading.Event(), threading.Event()

    def act() -> None:
        has_come.set()
        go_on.wait(20)

    files = FaultyFiles()
    tier = open_tier(tmp_path / "cache", files=files)
    assert tier.flush(10).is_empty
    files.before = {"create": act}
    for block in make_chain(10):
        tier.put(block)
    assert has_come.wait(20)
    go_on.set()
    assert tier.flush(10).is_empty
    assert sizes == [4, 4, 2]
    tier.close()


@pytest.mark.parametrize("num_at_start", [1, 8192])
def test_start_with_a_key_under_two_roots_rebuilds_the_catalogue(
    tmp_path: Path, num_at_start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contradiction is found at the start or when the remaining records are loaded."""
    monkeypatch.setattr("kvstrata.tiers.disk.block_store.NUM_RECORDS_AT_START", num_at_start)
    blocks = write_chain(tmp_path / "cache")
    connection = sqlite3.connect(tmp_path / "cache" / "catalogue.sqlite")
    connection.execute("UPDATE blocks SET root = zeroblob(32) WHERE start = 20")
    connection.commit()
    connection.close()
    assert_all_there(tmp_path / "cache", blocks)


class ListedFiles(FaultyFiles):
    """Lists the files of `rows`, which do not exist: a start must not open, stat or read them."""

    def __init__(self, rows: list[BlockRecord]) -> None:
        super().__init__()
        self.by_shard: dict[str, list[str]] = {f"{first:02x}": [] for first in range(256)}
        for row in rows:
            self.by_shard[row.id.key[:1].hex()].append(file_name(row.id))

    def names(self, folder: Path) -> list[str]:
        self._step("names")
        if folder.name == "blocks":
            return list(self.by_shard)
        return self.by_shard.get(folder.name, [])


@pytest.fixture(scope="module")
def large_catalogue(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[BlockRecord]]:
    directory = tmp_path_factory.mktemp("large") / "cache"
    open_tier(directory).close()
    generator = np.random.default_rng(0)
    keys = generator.bytes(32 * 100_000)
    rows: list[BlockRecord] = []
    for index in range(100_000):
        key = keys[32 * index : 32 * index + 32]
        parent = rows[-1].id.key if index % 200 else ROOT
        rows.append(BlockRecord(BlockId(key), parent, ROOT, index % 200 * 256, 256, 4096, float(index), 1, 0.0))
    catalogue = open_catalogue(directory / "catalogue.sqlite")
    catalogue.save(rows, [])
    catalogue.close()
    for first in range(256):
        (directory / "blocks" / f"{first:02x}").mkdir(mode=0o700)
    return directory, rows


@pytest.mark.perf
def test_start_with_100_000_blocks_takes_less_than_a_second(large_catalogue: tuple[Path, list[BlockRecord]]) -> None:
    directory, rows = large_catalogue
    times_s: list[float] = []
    for _ in range(2):
        files = ListedFiles(rows)
        started_s = time.thread_time()  # CPU time of this thread, whatever other load the machine has
        tier = open_tier(directory, limit_bytes=1 << 40, files=files)
        assert tier.blocks.lengths(rows[-7].id.key) == (256,)  # the records used last are found at once
        times_s.append(time.thread_time() - started_s)
        assert tier.flush(120).is_empty
        assert tier.blocks.lengths(rows[7].id.key) == (256,)
        assert tier.usage().num_blocks == 100_000
        assert tier.usage().num_tokens == 25_600_000
        assert not {"open", "read_into"}.intersection(files.steps)
        tier.close()
    assert min(times_s) < 1.0, times_s


@pytest.mark.perf
def test_lookup_among_100_000_blocks_takes_less_than_half_a_millisecond(
    large_catalogue: tuple[Path, list[BlockRecord]],
) -> None:
    directory, rows = large_catalogue
    tier = open_tier(directory, limit_bytes=1 << 40, files=ListedFiles(rows))
    assert tier.flush(120).is_empty
    started_s = time.thread_time()
    for row in rows[::100]:
        assert tier.blocks.find(row.id.key)
        tier.blocks.lengths(row.id.key)
    per_lookup_s = (time.thread_time() - started_s) / 2000
    tier.close()
    assert per_lookup_s < 0.0005
