"""Speed of the disk tier beside one plain file of the same size, and the bytes that request traces write to it.

rates   Writing ends when the data is on the disk (fsync). Reading is from the disk where the system can drop a file
        from the page cache (Linux), elsewhere from memory. Blocks have a checksum, an entry in the catalogue and a file
        each, and two threads read them; one thread writes and reads the plain file.
writes  Policies: after each reply, or at eviction only. The disk evicts nothing. A trace does not tell how a reply
        enters the next prompt, so there are two bounds. Lower: the next prompt of a session begins with the whole last
        prompt and its reply, and nothing is written twice. Upper: every next prompt has the last reply in other tokens,
        and everything after the last whole block of 512 tokens that both prompts share is written again. At eviction
        a block is written once, when memory first evicts it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.common import Rounds, command_line, run_app
from kvstrata.bench import trace as request_traces
from kvstrata.bench.figures import (
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
from kvstrata.bench.replay import KvstrataPolicy
from kvstrata.bench.trace import BLOCK_TOKENS as TRACE_BLOCK_TOKENS
from kvstrata.bench.trace import ReplayTrace, sessions
from kvstrata.cli.bench_options import Json, say, show
from kvstrata.errors import KvstrataError
from kvstrata.prefix_cache.keys import chain
from kvstrata.sizes import Size
from kvstrata.tiers.block import BLOCK_TOKENS, Block, BlockTensor
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.interface import Refused
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock

ROOT = bytes(32)
MOST_S = 600.0
CATALOGUE_BYTES = 64 * MIB  # more than it and the folders take


@dataclass(frozen=True)
class DiskRate(Figure):
    what: str
    blocks_mb_s: float
    file_mb_s: float
    share: float  # median of the rounds' ratios


@dataclass(frozen=True)
class DiskRates(Figure):
    num_blocks: int
    block_bytes: int
    rounds: int
    rates: tuple[DiskRate, ...]


@dataclass(frozen=True)
class DiskTimes:
    write_s: float
    read_s: float


def measure(directory: Path, num_blocks: int, block_bytes: int, rounds: int, progress: Progress = silent) -> DiskRates:
    """Measure rates in `directory`, which must be on the measured disk."""
    blocks = list(_blocks(num_blocks, block_bytes))
    cases = {"blocks": lambda: _through_tier(directory, blocks), "a plain file": lambda: _as_file(directory, blocks)}
    ours, plain = in_turns(cases, rounds, progress).values()
    nbytes = num_blocks * block_bytes
    writes = _rate("write", nbytes, [times.write_s for times in ours], [times.write_s for times in plain])
    reads = _rate("read", nbytes, [times.read_s for times in ours], [times.read_s for times in plain])
    return DiskRates(num_blocks, block_bytes, rounds, (writes, reads))


def _rate(what: str, nbytes: int, ours_s: Sequence[float], plain_s: Sequence[float]) -> DiskRate:
    ours, plain = (nbytes / statistics.median(times) / 1e6 for times in (ours_s, plain_s))
    return DiskRate(what, ours, plain, median_ratio(plain_s, ours_s))


def _blocks(num_blocks: int, block_bytes: int) -> Iterator[Block]:
    """Yield the chained blocks of one conversation."""
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


def _through_tier(directory: Path, blocks: Sequence[Block]) -> DiskTimes:
    nbytes = sum(block.nbytes for block in blocks)
    with _folder(directory) as folder:
        options = DiskOptions(folder, 2 * nbytes + CATALOGUE_BYTES, reserve_bytes=0, queue_bytes=2 * nbytes)
        tier = DiskTier(options, chain=chain)
        try:
            write_s = seconds(lambda: _put(tier, blocks))
            leave_page_cache(folder.rglob("*.safetensors"))
            return DiskTimes(write_s, seconds(lambda: _get(tier, blocks)))
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


def _as_file(directory: Path, blocks: Sequence[Block]) -> DiskTimes:
    with _folder(directory) as folder:
        path = folder / "plain"
        write_s = seconds(lambda: _write(path, blocks))
        leave_page_cache([path])
        return DiskTimes(write_s, seconds(lambda: _read(path, blocks)))


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


GIB = 1 << 30


@dataclass(frozen=True)
class DiskWrites(Figure):
    trace: str
    hours: float
    requests: int
    least_bytes: int  # after replies
    most_bytes: int
    memory_bytes: int  # for KV
    evicted_bytes: int  # at eviction from that, prompts alone: replies are no blocks of a trace

    def a_day(self, num_bytes: int) -> float:
        """Scale bytes to a day of the same load."""
        return num_bytes * 24 / self.hours if self.hours else 0.0


def measure_writes(trace: ReplayTrace, memories: Sequence[int], token_bytes: int) -> list[DiskWrites]:
    """Return a row for each size of memory for KV."""
    hours = (trace.requests[-1].time_s - trace.requests[0].time_s) / 3600
    least, most = (token_bytes * tokens for tokens in _written_tokens(trace))
    block_bytes = TRACE_BLOCK_TOKENS * token_bytes
    return [
        DiskWrites(
            trace=trace.name,
            hours=hours,
            requests=len(trace.requests),
            least_bytes=least,
            most_bytes=most,
            memory_bytes=nbytes,
            evicted_bytes=block_bytes * _num_evicted(trace, max(1, nbytes // block_bytes)),
        )
        for nbytes in memories
    ]


def writes_table(rows: Sequence[DiskWrites]) -> str:
    return lay_out(
        rows,
        [
            ("trace", "<22", lambda row: row.trace),
            ("hours", ">7.1f", lambda row: row.hours),
            ("requests", ">10", lambda row: row.requests),
            (
                "GiB a day",
                ">20",
                lambda row: f"{_gib_a_day(row, row.least_bytes)} to {_gib_a_day(row, row.most_bytes)}",
            ),
            ("memory GiB", ">12", lambda row: f"{row.memory_bytes / GIB:,.0f}"),
            ("at eviction", ">13", lambda row: _gib_a_day(row, row.evicted_bytes)),
        ],
        "GiB a day: written after replies, if the trace went on day and night",
    )


def _gib_a_day(row: DiskWrites, num_bytes: int) -> str:
    return f"{row.a_day(num_bytes) / GIB:,.0f}"


def _written_tokens(trace: ReplayTrace) -> tuple[int, int]:
    """Return the lower and the upper bound of written tokens."""
    least = most = 0
    known: set[int] = set()
    ends: dict[int, int] = {}  # session -> end of its last prompt and reply, in tokens
    for request, numbers, session in zip(trace.requests, trace.numbers, sessions(trace), strict=True):
        ids = numbers.tolist()
        num_known = next((at for at, number in enumerate(ids) if number not in known), len(ids))
        known.update(ids)
        shared = min(num_known * TRACE_BLOCK_TOKENS, request.prompt_tokens)
        last_end = ends.get(session, 0)
        goes_on_at = max(shared, last_end) if last_end <= request.prompt_tokens else shared
        end = request.prompt_tokens + request.num_reply_tokens
        least += end - goes_on_at
        most += end - shared
        ends[session] = end
    return least, most


def _num_evicted(trace: ReplayTrace, num_blocks: int) -> int:
    """Return the number of distinct blocks that memory evicts at least once."""
    evicted: set[int] = set()
    policy = KvstrataPolicy(num_blocks, evicted.update)
    for request in trace.requests:
        policy.serve(request)
    return len(evicted)


app = command_line()


@app.command()
def rates(
    directory: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="A folder on the measured disk.")
    ] = Path(),
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of a conversation.")] = 32,
    block_size: Annotated[str, typer.Option(help="Size of a block, such as 8MiB.", metavar="size")] = "8MiB",
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Measure how fast blocks are written to a disk and read back, beside a plain file of the same size."""
    nbytes = Size.parse(block_size).of(0)
    if nbytes < 1:
        raise typer.BadParameter(f"{block_size} is not a number of bytes, such as 8MiB", param_hint="--block-size")
    show(measure(directory, blocks, nbytes, rounds, progress=say), table, as_json=as_json)


@app.command()
def writes(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Request traces: .jsonl or .jsonl.gz with timestamp (ms) and hash_ids (512 tokens each)."),
    ] = None,
    budgets: Annotated[
        str,
        typer.Option(help="Memory for KV: shares of all distinct blocks, or sizes such as 8GiB, by commas."),
    ] = "1%,2%,5%,10%,20%",
    token_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of a token of KV (default: an 8 B model at 16 bits).")
    ] = 131072,
    made_up: Annotated[int, typer.Option(min=0, help="Also use a synthetic trace of this number of requests.")] = 0,
    as_json: Json = False,
) -> None:
    """Count the bytes that request traces write to the disk cache in a day: after each reply, and at eviction."""
    loaded = [request_traces.load_trace(path) for path in traces or []]
    loaded += [request_traces.made_up(made_up)] if made_up else []
    if not loaded:
        raise typer.BadParameter("Give a TRACE or --made-up 10000")
    rows: list[DiskWrites] = []
    for trace in loaded:
        all_bytes = trace.num_distinct * TRACE_BLOCK_TOKENS * token_bytes
        memories = [Size.parse(part.strip()).of(all_bytes) for part in budgets.split(",")]
        rows += measure_writes(trace, memories, token_bytes)
    show(rows, writes_table, as_json=as_json)


if __name__ == "__main__":
    run_app(app)
