"""Why a store did not do what it was asked: the names under which the remote tier counts. Knows nothing else."""

from __future__ import annotations

from enum import StrEnum

from kvstrata.errors import KvstrataError


class Fault(StrEnum):
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    DENIED = "denied"  # a wrong password, or no permission
    TLS = "tls"  # a certificate that is not trusted, or no TLS at the other end
    READ_ONLY = "read_only"
    FULL = "full"
    NO_PLACE = "no_place"  # the bucket or the folder does not exist
    OTHER = "other"


# Those that keep a tier from being written, and not from being read.
WRITE_FAULTS = frozenset({Fault.READ_ONLY, Fault.FULL})


class StoreFault(KvstrataError):
    """Raised by stores and caught inside remote/: outside it is a miss or a refusal, and at the start a ConfigError."""

    def __init__(self, reason: Fault, what: str) -> None:
        super().__init__(what)
        self.reason = reason


class Damage(StrEnum):
    """What came is not what its name says."""

    SEAL = "seal"  # damaged, forged, moved here from another name, or sealed with another secret
    HEADER = "header"
    SIZE = "size"  # larger than any block of this model
    KEY = "key"
    ROOT = "root"


class DamagedBlock(KvstrataError):
    """Raised and caught inside remote/: outside it is a miss with `reason`."""

    def __init__(self, reason: Damage, what: str) -> None:
        super().__init__(what)
        self.reason = reason
