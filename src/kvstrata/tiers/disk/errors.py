"""Reasons that the disk tier counts: drops, faults and removals."""

from __future__ import annotations

import errno
from enum import StrEnum

from kvstrata.tiers.disk.filesystem import NotAFile
from kvstrata.tiers.interface import BlockEvent, RemovalCause

DISK_EVENTS = frozenset(BlockEvent) - {BlockEvent.DELETED, BlockEvent.SKIPPED}


class DropReason(StrEnum):
    """The reasons for giving up an accepted block without a fault of the disk."""

    NO_ROOM = "no_room"
    RESERVE = "reserve"
    WRITE_BUDGET = "write_budget"
    CLOSED = "closed"
    UNWRITABLE = "unwritable"
    CLEARED = "cleared"


class DiskFault(StrEnum):
    """The faults that the operating system or the catalogue reports."""

    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    READ_ONLY = "read_only"
    VANISHED = "vanished"
    CATALOGUE = "catalogue"
    NOT_A_FILE = "not_a_file"
    OTHER = "other"


class RemovalReason(StrEnum):
    LIMIT = "limit"
    RESERVE = "reserve"
    EXPIRED = "expired"
    CLEARED = "cleared"
    OUTDATED = "outdated"


# The cause that the removal log has for a block that was given up.
CAUSES = {
    DropReason.NO_ROOM: RemovalCause.NO_ROOM,
    DropReason.RESERVE: RemovalCause.VOLUME_FULL,
    DropReason.WRITE_BUDGET: RemovalCause.WRITE_BUDGET,
    DropReason.UNWRITABLE: RemovalCause.UNWRITABLE,
    DropReason.CLEARED: RemovalCause.CLEARED,
    DiskFault.NO_SPACE: RemovalCause.VOLUME_FULL,
}

FAULTS = {
    errno.ENOSPC: DiskFault.NO_SPACE,
    errno.EDQUOT: DiskFault.NO_SPACE,
    errno.EFBIG: DiskFault.NO_SPACE,
    errno.EIO: DiskFault.IO_ERROR,
    errno.EROFS: DiskFault.READ_ONLY,
    errno.EACCES: DiskFault.READ_ONLY,
    errno.EPERM: DiskFault.READ_ONLY,
    errno.ENOENT: DiskFault.VANISHED,
    errno.ENOTDIR: DiskFault.VANISHED,
    errno.ENODEV: DiskFault.VANISHED,
    errno.ENXIO: DiskFault.VANISHED,
    errno.ESTALE: DiskFault.VANISHED,
}


def fault_of(error: OSError) -> DiskFault:
    if isinstance(error, NotAFile):
        return DiskFault.NOT_A_FILE
    return FAULTS.get(error.errno or 0, DiskFault.OTHER)
