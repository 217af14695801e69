"""How fast blocks get to a folder and back through the disk tier, beside one plain file with as many bytes.

Both are on the disk when writing ends (fsync), and are read from the disk where the system can be told to forget a file
(Linux); elsewhere from its memory. Blocks get a checksum, an entry in the catalogue and a file each, and two threads
read them; one writes and reads the plain file.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstrata.bench.driver import (
    MIB,
    Figure,
    Progress,
    in_turns,
    lay_out,
    leave_page_cache,
    median_ratio,
    seconds,
    silent,
)
from kvstrata.errors import KvstrataError
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import BLOCK_TOKENS, Block, BlockTensor
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.interface import Refused
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock

ROOT = bytes(32)
MOST_S = 600.0
CATALOGUE_BYTES = 64 * MIB  # more than it and the folders take


@dataclass(frozen=True)
class Rate(Figure):
    what: str
    blocks_mb_s: float
    file_mb_s: float
    share: float  # median of the rounds' ratios


@dataclass(frozen=True)
class DiskRates(Figure):
    num_blocks: int
    block_bytes: int
    rounds: int
    rates: tuple[Rate, ...]


@dataclass(frozen=True)
class Times:
    write_s: float
    read_s: float


def measure(directory: Path, num_blocks: int, block_bytes: int, rounds: int, progress: Progress = silent) -> DiskRates:
    """`directory`: on the disk that is asked about."""
    blocks = list(_blocks(num_blocks, block_bytes))
    cases = {"blocks": lambda: _through_tier(directory, blocks), "a plain file": lambda: _as_file(directory, blocks)}
    ours, plain = in_turns(cases, rounds, progress).values()
    nbytes = num_blocks * block_bytes
    writes = _rate("write", nbytes, [times.write_s for times in ours], [times.write_s for times in plain])
    reads = _rate("read", nbytes, [times.read_s for times in ours], [times.read_s for times in plain])
    return DiskRates(num_blocks, block_bytes, rounds, (writes, reads))


def _rate(what: str, nbytes: int, ours_s: Sequence[float], plain_s: Sequence[float]) -> Rate:
    ours, plain = (nbytes / statistics.median(times) / 1e6 for times in (ours_s, plain_s))
    return Rate(what, ours, plain, median_ratio(plain_s, ours_s))


def _blocks(num_blocks: int, block_bytes: int) -> Iterator[Block]:
    """One conversation."""
    random, parent = np.random.default_rng(0), ROOT
    for number in range(num_blocks):
        ids = random.integers(0, 50_000, BLOCK_TOKENS, np.int32)
        data = random.integers(0, 256, block_bytes, np.uint8)
        tensors = {"0.k.values": BlockTensor("U8", (block_bytes,), data)}
        key = chain(parent, ids)
        yield Block(key, parent, ROOT, number * BLOCK_TOKENS, ids.astype("<i4").tobytes(), tensors, {})
        parent = key


@contextmanager
def _folder(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=directory) as name:
        yield Path(name)


def _through_tier(directory: Path, blocks: Sequence[Block]) -> Times:
    nbytes = sum(block.nbytes for block in blocks)
    with _folder(directory) as folder:
        options = DiskOptions(folder, 2 * nbytes + CATALOGUE_BYTES, reserve_bytes=0, queue_bytes=2 * nbytes)
        tier = DiskTier(options, chain=chain)
        try:
            write_s = seconds(lambda: _put(tier, blocks))
            leave_page_cache(folder.rglob("*.safetensors"))
            return Times(write_s, seconds(lambda: _get(tier, blocks)))
        finally:
            tier.close()


def _put(tier: DiskTier, blocks: Sequence[Block]) -> None:
    for block in blocks:
        answer = tier.put(block)
        if isinstance(answer, Refused):
            raise KvstrataError(f"The disk cache did not take a block: {answer.reason}")
    is_empty = tier.flush(MOST_S).is_empty
    if not is_empty or not all(tier.blocks.find(block.key) for block in blocks):
        raise KvstrataError(f"The disk cache did not write all of {len(blocks)} blocks")


def _get(tier: DiskTier, blocks: Sequence[Block]) -> None:
    missing: list[MissingBlock] = []

    def deliver(came: LoadedBlock | MissingBlock) -> None:
        if isinstance(came, MissingBlock):
            missing.append(came)
        came.release()

    reading = tier.read([block.id for block in blocks], deliver, root=ROOT)
    if not reading.wait(MOST_S) or missing:
        why = ", ".join(sorted({str(each.reason) for each in missing})) or f"not within {MOST_S:.0f} s"
        raise KvstrataError(f"Of {len(blocks)} blocks not all came back from the disk cache: {why}")


def _as_file(directory: Path, blocks: Sequence[Block]) -> Times:
    with _folder(directory) as folder:
        path = folder / "plain"
        write_s = seconds(lambda: _write(path, blocks))
        leave_page_cache([path])
        return Times(write_s, seconds(lambda: _read(path, blocks)))


def _write(path: Path, blocks: Sequence[Block]) -> None:
    with path.open("wb") as file:
        for block in blocks:
            for tensor in block.tensors.values():
                file.write(tensor.data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, blocks: Sequence[Block]) -> None:
    with path.open("rb") as file:
        for block in blocks:
            nbytes = sum(tensor.nbytes for tensor in block.tensors.values())
            if file.readinto(np.empty(nbytes, np.uint8).data) != nbytes:
                raise KvstrataError("A plain file is shorter than what was written")


def table(figures: DiskRates) -> str:
    columns = [
        ("MB/s", "<8", lambda row: row.what),
        ("blocks", ">10.0f", lambda row: row.blocks_mb_s),
        ("a plain file", ">14.0f", lambda row: row.file_mb_s),
        ("share", ">8.0%", lambda row: row.share),
    ]
    sizes = (
        f"{figures.num_blocks} blocks of {figures.block_bytes / MIB:g} MiB, medians of {figures.rounds} rounds in turns"
    )
    return lay_out(figures.rates, columns, sizes)
