"""Damage of every kind is a miss with a reason. No wrong byte is served."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import Block, BlockId
from kvstrata.tiers.block_file import Checksum, Damage, DamagedBlock
from kvstrata.tiers.disk.filesystem import FileStatus, Filesystem
from kvstrata.tiers.disk.folder import file_name
from kvstrata.tiers.disk.reader import read_block
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.read_pool import MissingBlock, MissReason
from tests.tiers.disk.blocks import (
    OTHER_ROOT,
    ROOT,
    are_equal,
    content_of,
    is_same,
    make_block,
    make_chain,
    open_tier,
    path_of,
    put_all,
    read_now,
    real_bytes,
    with_header,
)
from tests.tiers.disk.faults import FaultyFiles, cut, fail, flip, swap


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[DiskTier, list[Block], Path]]:
    tier = open_tier(tmp_path / "cache")
    blocks = make_chain(3)
    put_all(tier, blocks)
    yield tier, blocks, tmp_path / "cache"
    tier.close()


def read(path: Path, block: Block) -> Block:
    return read_block(Filesystem(), path, block.id, chain=chain, root=ROOT)


def test_read_any_flipped_byte_is_damage(tmp_path: Path) -> None:
    """Flip each byte of the file, padding included, and each single bit of the header."""
    block = make_block(num_values=8)
    path = tmp_path / "block"
    content = content_of(block)
    path.write_bytes(content)
    said = len(content.rstrip(b" ")) if content[-1] == 32 else content.index(b"   ")
    reasons: set[Damage] = set()
    for offset in range(len(content)):
        masks = (1, 2, 4, 8, 16, 32, 64, 128) if offset < said else (1 << offset % 8, 0xFF)
        for mask in masks:
            flip(path, offset, mask)
            with pytest.raises(DamagedBlock) as damage:
                read(path, block)
            reasons.add(damage.value.reason)
            flip(path, offset, mask)
    assert are_equal(read(path, block), block)
    assert reasons == {Damage.HEADER, Damage.VERSION, Damage.LENGTH, Damage.TENSOR}


def test_read_cut_or_longer_file_is_damage(tmp_path: Path) -> None:
    block = make_block(num_values=8)
    path = tmp_path / "block"
    content = content_of(block, Checksum.SHA256)
    path.write_bytes(content)
    for length in reversed(range(len(content))):
        cut(path, length)
        with pytest.raises(DamagedBlock) as damage:
            read(path, block)
        assert damage.value.reason is Damage.LENGTH
    path.write_bytes(content + b"\0")
    with pytest.raises(DamagedBlock) as damage:
        read(path, block)
    assert damage.value.reason is Damage.LENGTH


def quarantined(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "quarantine").iterdir())


@pytest.mark.parametrize(
    ("offset", "reason"), [(4096, Damage.TENSOR), (100, Damage.HEADER), (4000, Damage.HEADER), (50, Damage.VERSION)]
)
def test_read_damaged_file_is_a_miss_and_quarantines_it(stored, offset: int, reason: Damage) -> None:
    tier, blocks, directory = stored
    path = path_of(directory, blocks[1])
    flip(path, offset)
    assert read_now(tier, blocks[1].id, root=ROOT) == MissingBlock(blocks[1].id, reason)
    assert not path.exists()
    assert quarantined(directory) == [f"{path.name}.{reason}"]
    assert not tier.blocks.find(blocks[1].key)
    assert tier.blocks.lengths(blocks[0].key) == ()
    usage = tier.usage()
    assert usage.counters["quarantined"] == {reason: 1}
    assert usage.counters["missed"] == {reason: 1}
    assert usage.num_blocks == 2
    assert usage.quarantine_bytes > 0
    assert is_same(read_now(tier, blocks[2].id, root=ROOT), blocks[2])


def test_put_after_damage_writes_the_block_again(stored) -> None:
    tier, blocks, directory = stored
    cut(path_of(directory, blocks[1]), 4000)
    assert isinstance(read_now(tier, blocks[1].id, root=ROOT), MissingBlock)
    tier.put(blocks[1])
    assert tier.flush(10).is_empty
    assert is_same(read_now(tier, blocks[1].id, root=ROOT), blocks[1])


def test_read_swapped_files_is_a_miss(stored) -> None:
    tier, blocks, directory = stored
    swap(path_of(directory, blocks[0]), path_of(directory, blocks[2]))
    for block in (blocks[0], blocks[2]):
        assert read_now(tier, block.id, root=ROOT) == MissingBlock(block.id, Damage.KEY)
    assert len(quarantined(directory)) == 2


def test_read_file_under_the_name_of_another_part_is_a_miss(stored) -> None:
    tier, blocks, directory = stored
    mark = BlockId(blocks[0].key, "mark")
    path_of(directory, blocks[0]).rename(path_of(directory, blocks[0]).with_name(file_name(mark)))
    assert read_now(tier, mark, root=ROOT) == MissingBlock(mark, Damage.KEY)


def plant(directory: Path, block: Block, name: BlockId) -> None:
    path = path_of(directory, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content_of(block))


def test_read_block_of_another_root_is_a_miss(stored) -> None:
    tier, _, directory = stored
    foreign = make_block(9, parent=OTHER_ROOT, root=OTHER_ROOT)
    plant(directory, foreign, foreign.id)
    assert read_now(tier, foreign.id, root=ROOT) == MissingBlock(foreign.id, Damage.ROOT)


def test_read_token_ids_that_contradict_the_key_is_a_miss(stored) -> None:
    """Every checksum is correct, so only the chained key shows the contradiction."""
    tier, blocks, directory = stored
    other = make_block(77)
    lying = Block(blocks[0].key, ROOT, ROOT, 0, other.token_ids, other.tensors, {})
    plant(directory, lying, lying.id)
    assert read_now(tier, lying.id, root=ROOT) == MissingBlock(lying.id, Damage.TOKENS)


def test_read_other_format_version_is_a_miss(stored) -> None:
    tier, blocks, directory = stored
    path = path_of(directory, blocks[0])
    path.write_bytes(path.read_bytes().replace(b"kvstrata.block.1", b"kvstrata.block.0", 1))
    assert read_now(tier, blocks[0].id, root=ROOT) == MissingBlock(blocks[0].id, Damage.VERSION)


def test_read_file_that_is_no_block_or_a_link_is_a_miss(stored) -> None:
    tier, blocks, directory = stored
    path_of(directory, blocks[0]).write_bytes(b"something else, long enough to be read as a header of some kind" * 100)
    assert read_now(tier, blocks[0].id, root=ROOT) == MissingBlock(blocks[0].id, Damage.HEADER)
    path = path_of(directory, blocks[1])
    aside = path.rename(directory / "aside")
    path.symlink_to(aside)
    assert isinstance(read_now(tier, blocks[1].id, root=ROOT), MissingBlock)


def test_read_invalid_header_with_a_right_checksum_is_damage(tmp_path: Path) -> None:
    block, path = make_block(), tmp_path / "block"
    for change in (
        {"num_tokens": "5"},
        {"token_ids": "", "num_tokens": "0"},
        {"start": "-1"},
        {"start": "x"},
        {"parent": "00"},
        {"description": "{"},
        {"checksum.v": "crc:0"},
        {"part": "../x"},
    ):
        path.write_bytes(
            with_header(content_of(block), lambda fields, change=change: fields["__metadata__"].update(change))
        )
        with pytest.raises(DamagedBlock):
            read(path, block)


def damaged(generator: np.random.Generator, content: bytes, other: bytes) -> bytes:
    """Return content with random damage: flipped bits, a zeroed run, a run of another file, a cut or reversed bytes."""
    changed = bytearray(content)
    at = int(generator.integers(len(changed)))
    length = int(generator.integers(1, 600))
    match int(generator.integers(5)):
        case 0:
            for _ in range(int(generator.integers(1, 4))):
                changed[int(generator.integers(len(changed)))] ^= 1 << int(generator.integers(8))
        case 1:
            changed[at : at + length] = bytes(len(changed[at : at + length]))
        case 2:
            changed[at : at + length] = other[at : at + length]
        case 3:
            del changed[at:]
        case _:
            changed[at : at + length] = changed[at : at + length][::-1]
    return bytes(changed)


class Damaging(Filesystem):
    """A filesystem on which every read returns bytes of `content`."""

    content = b""

    def status(self, place: int | Path) -> FileStatus:
        found = super().status(place)
        return replace(found, size_bytes=len(self.content)) if isinstance(place, int) else found

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:  # noqa: ARG002
        piece = self.content[offset : offset + buffer.nbytes]
        buffer[: len(piece)] = piece
        return len(piece)


def test_read_random_damage_is_always_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    generator = np.random.default_rng(2024)
    files = Damaging()
    tier = open_tier(tmp_path / "cache", files=files)
    blocks = make_chain(2, num_values=200)
    contents = [content_of(block) for block in blocks]
    tier.put(blocks[1])
    assert tier.flush(10).is_empty  # the scan is done, so the writer looks for no new files
    path = path_of(tmp_path / "cache", blocks[0])
    path.parent.mkdir(exist_ok=True)
    num_missed = 0
    for _ in range(10_000):
        path.touch()
        files.content = contents[0]
        while files.content == contents[0]:  # changed padding may equal the old padding
            files.content = damaged(generator, contents[0], contents[1])
        num_missed += isinstance(read_now(tier, blocks[0].id, root=ROOT), MissingBlock) and not path.exists()
    assert num_missed == 10_000
    assert len(quarantined(tmp_path / "cache")) <= 32
    assert sum(tier.usage().counters["quarantined"].values()) == 10_000
    files.content = contents[0]
    path.touch()
    assert is_same(read_now(tier, blocks[0].id, root=ROOT), blocks[0])
    tier.close()


def test_read_random_damage_of_real_files_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    generator = np.random.default_rng(7)
    tier = open_tier(tmp_path / "cache")
    blocks = make_chain(300, num_values=60)
    for block in blocks:
        plant(tmp_path / "cache", block, block.id)
    contents = {block.key: path_of(tmp_path / "cache", block).read_bytes() for block in blocks}
    for block, other in zip(blocks, blocks[1:] + blocks[:1], strict=True):
        content = damaged(generator, contents[block.key], contents[other.key])
        path_of(tmp_path / "cache", block).write_bytes(content)
        result = read_now(tier, block.id, root=ROOT)
        assert is_same(result, block) if content == contents[block.key] else isinstance(result, MissingBlock)
    tier.close()


def test_read_bits_flipped_by_the_disk_is_a_miss(tmp_path: Path) -> None:
    class Flipping(Filesystem):
        def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
            count = super().read_into(fd, buffer, offset)
            if offset >= 4096:
                buffer[count // 2] ^= 4
            return count

    tier = open_tier(tmp_path / "cache", files=Flipping())
    block = make_block()
    tier.put(block)
    assert tier.flush(10).is_empty
    assert read_now(tier, block.id, root=ROOT) == MissingBlock(block.id, Damage.TENSOR)
    tier.close()


def test_quarantine_failing_deletes_the_file_or_keeps_it_a_miss(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path / "cache", files=files)
    blocks = make_chain(2)
    put_all(tier, blocks)
    for block in blocks:
        flip(path_of(tmp_path / "cache", block), 4096)
    files.before = {"rename": fail(errno.EIO)}
    assert read_now(tier, blocks[0].id, root=ROOT) == MissingBlock(blocks[0].id, Damage.TENSOR)
    assert not path_of(tmp_path / "cache", blocks[0]).exists()
    files.before = {"rename": fail(errno.EROFS), "unlink": fail(errno.EROFS)}
    assert read_now(tier, blocks[1].id, root=ROOT) == MissingBlock(blocks[1].id, Damage.TENSOR)
    assert read_now(tier, blocks[1].id, root=ROOT) == MissingBlock(blocks[1].id, MissReason.ABSENT)
    usage = tier.usage()
    assert usage.num_blocks == 0
    assert usage.leaving_bytes == path_of(tmp_path / "cache", blocks[1]).stat().st_blocks * 512
    assert usage.disk_bytes == real_bytes(tmp_path / "cache")
    files.before = {}
    tier.clear()
    assert tier.flush(10).is_empty
    assert not path_of(tmp_path / "cache", blocks[1]).exists()
    tier.close()


def test_quarantine_is_bounded_in_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "cache", 4 << 20)  # the quarantine has 2 % of it: 80 KiB
    blocks = make_chain(6, num_values=3000)  # about 36 KiB each
    put_all(tier, blocks)
    for block in blocks:
        cut(path_of(tmp_path / "cache", block), 20_000)
        assert isinstance(read_now(tier, block.id, root=ROOT), MissingBlock)
    assert 0 < tier.usage().quarantine_bytes <= 0.02 * (4 << 20)
    assert 0 < len(quarantined(tmp_path / "cache")) < 6
    tier.close()
