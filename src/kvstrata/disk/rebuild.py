"""The catalogue's rows again, from what is in the folder. Reads headers, never a payload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.disk.blockfile import opened, read_header
from kvstrata.disk.files import Files
from kvstrata.disk.format import DamagedBlock
from kvstrata.disk.reasons import Damage, Fault, fault_of
from kvstrata.disk.row import BlockRow, write_tally
from kvstrata.tier.block import BlockId, Tally, no_tally


@dataclass(frozen=True, slots=True)
class DamagedFile:
    path: Path
    reason: Damage
    what: str = field(default="", compare=False)  # of a file in another format: which


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """Counted, and not served until the next start."""

    path: Path
    reason: Fault


def rows_of(
    files: Files, stored: Iterable[tuple[Path, BlockId]], tally: Tally = no_tally
) -> Iterator[BlockRow | DamagedFile | UnreadFile]:
    for path, block in stored:
        try:
            yield _row_of(files, path, block, tally)
        except DamagedBlock as damage:
            yield DamagedFile(path, damage.reason, str(damage))
        except FileNotFoundError:
            continue
        except OSError as error:
            yield UnreadFile(path, fault_of(error))


def _row_of(files: Files, path: Path, block: BlockId, tally: Tally) -> BlockRow:
    with opened(files, path) as fd:
        status = files.status(fd)
        header = read_header(files, fd)
    if header.id != block:
        raise DamagedBlock(Damage.KEY, "the file holds another block than its name says")
    if header.file_bytes != status.size_bytes:
        raise DamagedBlock(Damage.LENGTH, "the file is not as long as its header says")
    return BlockRow(
        id=block,
        parent=header.parent,
        root=header.root,
        start=header.start,
        num_tokens=header.num_tokens,
        disk_bytes=status.disk_bytes,
        last_use=status.modified,
        uses=0,
        created=status.modified,
        tally=write_tally(tally(header.description, {name: place.nbytes for name, place in header.places.items()})),
    )
