"""Kill a writing process repeatedly and verify the folder that it leaves. test_kill.py runs this in a separate process,
because it forks, which a process with threads must not do.

    python -m tests.tiers.disk.kill_runs DIRECTORY random|steps COUNT SEED

Prints one JSON object: counts of errors, which should be 0, and of checks.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import Block
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.disk.inspect import verify
from kvstrata.tiers.disk.tier import DiskTier
from tests.tiers.disk.blocks import ROOT, is_same, make_chain, open_tier, read_now, real_bytes
from tests.tiers.disk.faults import FaultyFiles, kill

LIMIT_BYTES = 256 << 20
SMALL_LIMIT_BYTES = 2 << 20
CHAIN_LENGTH = 3
BEGUN = 900_000
BEGUN_TO_REMOVE = 900_001


def blocks_of(seed: int) -> list[Block]:
    return make_chain(CHAIN_LENGTH, seed=seed, num_values=500 + seed % 7 * 700)


def write_until_killed(directory: Path, files: Filesystem, limit_bytes: int, first_seed: int, report: int) -> None:
    """Write chains, and report each once a flush has written it. Remove durably the chain BEGUN_TO_REMOVE at first, and
    every third chain after it is written; report these once a flush has deleted their files."""
    tier = open_tier(directory, limit_bytes, files=files)
    remove(tier, BEGUN_TO_REMOVE, report)
    for seed in range(first_seed, first_seed + 1000):
        blocks = blocks_of(seed)
        for block in blocks:
            tier.put(block)
        tier.flush(30)
        if tier.usage().counters["written"].get("base", 0) == CHAIN_LENGTH * (seed - first_seed + 1):
            os.write(report, f"{seed}\n".encode())
        read_now(tier, blocks[0].id, root=ROOT)
        if is_removed(seed):
            remove(tier, seed, report)
    os._exit(3)


def is_removed(seed: int) -> bool:
    return seed % 3 == 1 or seed == BEGUN_TO_REMOVE


def remove(tier: DiskTier, seed: int, report: int) -> None:
    tier.remove([block.id for block in blocks_of(seed)], durable=True)
    tier.flush(30)
    os.write(report, f"-{seed}\n".encode())


def run_child(
    directory: Path, files: Filesystem, limit_bytes: int, first_seed: int, delay_s: float, *, waits: bool = False
) -> list[int]:
    """Run a child until it is killed, after `delay_s` or by its own `files`. Return the seeds of the chains that it
    reported. `waits`: the delay begins with the first report."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            write_until_killed(directory, files, limit_bytes, first_seed, writing)
        finally:
            os._exit(4)
    os.close(writing)
    first = os.read(reading, 100) if waits else b""
    if delay_s:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"The child ended by itself with {os.waitstatus_to_exitcode(status)}")
    with os.fdopen(reading, "rb") as pipe:
        return [int(line) for line in (first + pipe.read()).decode().split()]


def check_folder(
    directory: Path, limit_bytes: int, seeds: list[int], found: Counter[str], *, loses_catalogue: bool = False
) -> None:
    bytes_left = real_bytes(directory)
    for path in directory.glob("catalogue*") if loses_catalogue else ():
        path.unlink()
    tier = open_tier(directory, limit_bytes)
    found["temporaries"] += len(list((directory / "tmp").iterdir()))
    found["over the limit"] += bytes_left > limit_bytes
    found["not settled"] += not tier.flush(30).is_empty
    for seed in filter(lambda seed: seed > 0, seeds):
        num_there = 0
        for block in blocks_of(seed):
            found["reported"] += 1
            is_there = bool(tier.blocks.find(block.key))
            num_there += is_there
            found["wrong"] += is_there and not is_same(read_now(tier, block.id, root=ROOT), block)
        if -seed in seeds:
            found["removed"] += 1
            found["removed and back"] += num_there
        elif is_removed(seed):
            # The marker is written before the first delete, so all of the chain stays removed, or none.
            found["half removed"] += num_there not in (0, CHAIN_LENGTH)
        else:
            found["reported and lost"] += CHAIN_LENGTH - num_there
    found["markers left"] += len(list((directory / "cleared").iterdir()))
    usage = tier.usage()
    found["quarantined"] += sum(usage.counters["quarantined"].values())
    found["miscounted"] += usage.disk_bytes != real_bytes(directory)
    found["blocks"] = usage.num_blocks
    tier.close()
    verified = verify(directory, chain=chain)
    found["damaged"] += len(verified.damaged) + len(verified.unread)
    found["uncounted files"] += verified.num_blocks != usage.num_blocks


def kill_at_random(directory: Path, count: int, seed: int) -> Counter[str]:
    generator = random.Random(seed)
    found: Counter[str] = Counter()
    for number in range(count):
        # Every third run has a folder with a small limit, so that kills interrupt evictions.
        is_small = number % 3 == 2
        place, limit_bytes = (
            (directory / "small", SMALL_LIMIT_BYTES) if is_small else (directory / "large", LIMIT_BYTES)
        )
        # Every other run waits for the first report, so that it has written something on a busy machine, too.
        delay_s, waits = generator.uniform(0.01, 0.3), number % 2 == 0
        seeds = run_child(place, Filesystem(), limit_bytes, 1000 * number + 1, delay_s, waits=waits)
        check_folder(place, limit_bytes, [] if is_small else seeds, found, loses_catalogue=number % 5 == 4)
        found["kills"] += 1
    return found


def kill_at_every_step(directory: Path, count: int, _seed: int) -> Counter[str]:
    """Kill at operation 0, 1, 2 ... of the tier, each time in a fresh folder with two chains."""
    found: Counter[str] = Counter()
    seeds = [BEGUN, BEGUN_TO_REMOVE]
    tier = open_tier(directory / "begun", LIMIT_BYTES)
    for block in [block for seed in seeds for block in blocks_of(seed)]:
        tier.put(block)
    tier.flush(30)
    tier.close()
    for step in range(count):
        place = shutil.copytree(directory / "begun", directory / str(step))
        reported = run_child(place, FaultyFiles(at_step={step: kill}), LIMIT_BYTES, 1, 0.0)
        check_folder(place, LIMIT_BYTES, [*seeds, *reported], found, loses_catalogue=step % 2 == 1)
        found["kills"] += 1
    return found


def main() -> None:
    directory, mode, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    directory.mkdir(exist_ok=True)
    print(json.dumps({"random": kill_at_random, "steps": kill_at_every_step}[mode](directory, count, seed)))


if __name__ == "__main__":
    main()
