"""Measure reads of verified blocks against plain preadv of the same files, in one run.

    python -m tests.tiers.disk.read_speed DIRECTORY [NUM_BLOCKS] [MIB_OF_EACH] [DiskOptions.num_readers]

The page cache is dropped before each pass (Linux). Prints a line for each round: GB/s of preadv, GB/s of
`DiskTier.read` with all checks, and their ratio; then the CPU seconds of each for a gigabyte.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import Block, BlockId, BlockTensor
from kvstrata.tiers.block_file import fastest
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.interface import Accepted
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock
from tests.tiers.disk.blocks import ROOT, path_of

NUM_ROUNDS = 5
NUM_PLANES = 8


def fill(tier: DiskTier, num_blocks: int, nbytes: int) -> list[Block]:
    generator = np.random.default_rng(0)
    blocks: list[Block] = []
    parent = ROOT
    for index in range(num_blocks):
        ids = generator.integers(0, 50_000, 256, dtype=np.int32)
        plane_bytes = nbytes // NUM_PLANES
        tensors = {
            f"plane.{plane}": BlockTensor(
                "U8", (plane_bytes,), generator.integers(0, 256, plane_bytes, dtype=np.uint8).data
            )
            for plane in range(NUM_PLANES)
        }
        block = Block(chain(parent, ids), parent, ROOT, 256 * index, ids.astype("<i4").tobytes(), tensors, {})
        while tier.put(block) != Accepted():
            tier.flush(60)
        blocks.append(block)
        parent = block.key
    tier.flush(120)
    return blocks


def read_plainly(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        buffer = np.empty(size, dtype=np.uint8).data
        done = 0
        while done < size:
            done += os.preadv(fd, [buffer[done:]], done)
        os.close(fd)


def read_verified(tier: DiskTier, ids: list[BlockId]) -> None:
    results: list[bool] = []

    def deliver(result: LoadedBlock | MissingBlock) -> None:
        results.append(isinstance(result, LoadedBlock))
        result.release()

    if not tier.read(ids, deliver, root=ROOT).wait(300) or not all(results):
        raise RuntimeError("Not every block came back")


def gigabytes_per_s(paths: list[Path], read: Callable[[], None]) -> tuple[float, float]:
    """Return GB/s, and CPU seconds for a gigabyte."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    gigabytes = sum(path.stat().st_size for path in paths) / 1e9
    started, worked = time.perf_counter(), time.process_time()
    read()
    return gigabytes / (time.perf_counter() - started), (time.process_time() - worked) / gigabytes


def main() -> None:
    numbers = [int(word) for word in sys.argv[2:]]
    num_blocks, mib, num_readers = (*numbers, *(64, 4, DiskOptions.num_readers)[len(numbers) :])
    directory = Path(sys.argv[1])
    options = DiskOptions(directory, 64 << 30, reserve_bytes=0, num_readers=num_readers)
    tier = DiskTier(options, chain=chain)
    blocks = fill(tier, num_blocks, mib << 20)
    paths = [path_of(directory, block) for block in blocks]
    ids = [block.id for block in blocks]
    rounds: list[tuple[float, float, float, float]] = []
    for _ in range(NUM_ROUNDS):
        plain, plain_s = gigabytes_per_s(paths, lambda: read_plainly(paths))
        verified, verified_s = gigabytes_per_s(paths, lambda: read_verified(tier, ids))
        rounds.append((plain, verified, plain_s, verified_s))
        print(f"plain {plain:.2f} GB/s  verified {verified:.2f} GB/s  ratio {verified / plain:.2f}")
    plain_s, verified_s = (statistics.median(round_[column] for round_ in rounds) for column in (2, 3))
    ratio = statistics.median(verified / plain for plain, verified, _, _ in rounds)
    print(f"{fastest()}: median ratio {ratio:.2f}; processor s/GB: plain {plain_s:.2f}, verified {verified_s:.2f}")
    tier.close()
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
