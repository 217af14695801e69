"""The file format of a block: header, checksums, tensors."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from blake3 import blake3

from kvstrata.errors import KvstrataError
from kvstrata.tiers.block import ITEM_BYTES, Block, BlockId, BlockTensor, Chain, key_of
from kvstrata.tiers.write_limits import Pace, slices_of, unpaced

PROBE_BYTES = 1 << 20

NUM_PROBES = 3


class Checksum(StrEnum):
    SHA256 = "sha256"
    BLAKE3 = "blake3"

    def of(self, content: memoryview, pace: Pace = unpaced) -> str:
        """Return the digest with its name. Both algorithms release the GIL for all but the smallest input."""
        digest = hashlib.sha256() if self is Checksum.SHA256 else blake3()
        for piece in slices_of(content):
            pace(partial(digest.update, piece))
        return f"{self.value}:{digest.hexdigest()}"


def _matches(expected: str, content: memoryview) -> bool:
    name = expected.partition(":")[0]
    return any(checksum.of(content) == expected for checksum in Checksum if checksum.value == name)


def fastest() -> Checksum:
    probe = memoryview(bytes(PROBE_BYTES))
    return min(Checksum, key=lambda checksum: _best_time_s(checksum, probe))


def _best_time_s(checksum: Checksum, probe: memoryview) -> float:
    times_s: list[float] = []
    for _ in range(NUM_PROBES):
        started = time.perf_counter()
        checksum.of(probe)
        times_s.append(time.perf_counter() - started)
    return min(times_s)


FORMAT_VERSION = 1

ALIGNMENT_BYTES = 4096

LENGTH_BYTES = 8

LARGEST_HEADER_BYTES = 16 << 20

MAGIC = b'{"__metadata__":{"format":"kvstrata.block.'

OPENING = MAGIC + f'{FORMAT_VERSION}","checksum":"'.encode()

NUM_DIGITS = 64

CHECKSUM_AT = LENGTH_BYTES + len(OPENING)

CHECKSUM_ENDS = CHECKSUM_AT + NUM_DIGITS


class Damage(StrEnum):
    """The ways in which the bytes of a block differ from its name, its header or its seal."""

    LENGTH = "length"
    HEADER = "header"
    VERSION = "version"
    KEY = "key"
    TOKENS = "tokens"
    ROOT = "root"
    TENSOR = "tensor"
    SEAL = "seal"  # damaged, forged, moved here from another name, or sealed with another secret
    SIZE = "size"  # larger than any block of this model


class DamagedBlock(KvstrataError):
    """A block failed verification. Tiers answer with a miss with `reason`, a bundle with UnusableFile."""

    def __init__(self, reason: Damage, what: str) -> None:
        super().__init__(what)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The bytes of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file
    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class BlockHeader:
    id: BlockId
    parent: bytes
    root: bytes
    start: int
    token_ids: bytes
    description: Mapping[str, Any]
    ranges: Mapping[str, TensorRange]
    header_bytes: int  # where the first tensor begins
    file_bytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    def block(self, tensors: Mapping[str, BlockTensor]) -> Block:
        """Return the block that the header describes, with these tensors."""
        return Block(
            key=self.id.key,
            parent=self.parent,
            root=self.root,
            start=self.start,
            token_ids=self.token_ids,
            tensors=tensors,
            description=self.description,
            part=self.id.part,
        )


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    pieces: tuple[memoryview, ...]
    nbytes: int


def encode_block(block: Block, checksum: Checksum, pace: Pace = unpaced) -> EncodedBlock:
    """Encode a block without a copy of its tensors. `pace` throttles the checksums."""
    names = _in_file_order(block.tensors)
    views = tuple(block.tensors[name].view() for name in names)
    metadata = {
        "key": block.key.hex(),
        "part": block.part,
        "parent": block.parent.hex(),
        "root": block.root.hex(),
        "start": str(block.start),
        "num_tokens": str(block.num_tokens),
        "token_ids": base64.b64encode(block.token_ids).decode(),
        "description": json.dumps(block.description, sort_keys=True, separators=(",", ":"), allow_nan=False),
    }
    metadata |= {f"checksum.{name}": checksum.of(view, pace) for name, view in zip(names, views, strict=True)}
    header = _seal(metadata, _table(block.tensors, names))
    return EncodedBlock((memoryview(header), *views), len(header) + sum(view.nbytes for view in views))


def _in_file_order(tensors: Mapping[str, BlockTensor]) -> tuple[str, ...]:
    # Wide elements first: every tensor then begins at a multiple of its element size.
    return tuple(sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name)))


def _table(tensors: Mapping[str, BlockTensor], names: tuple[str, ...]) -> dict[str, object]:
    table: dict[str, object] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return table


def _seal(metadata: Mapping[str, str], table: Mapping[str, object]) -> bytes:
    rest = json.dumps({"": metadata, **table}, separators=(",", ":")).encode()
    body = OPENING + b"0" * NUM_DIGITS + b'",' + rest[len(b'{"":{') :]
    padding = -(LENGTH_BYTES + len(body)) % ALIGNMENT_BYTES
    header = bytearray((len(body) + padding).to_bytes(LENGTH_BYTES, "little") + body + b" " * padding)
    if len(header) > LARGEST_HEADER_BYTES:
        raise ValueError(f"A header of {len(header)} bytes: at most {LARGEST_HEADER_BYTES} can be read back")
    header[CHECKSUM_AT:CHECKSUM_ENDS] = blake3(bytes(header)).hexdigest().encode()
    return bytes(header)


def header_bytes_of(beginning: bytes) -> int:
    """Return the length of the header that begins with these bytes; DamagedBlock if they begin no header."""
    if len(beginning) < CHECKSUM_ENDS:
        raise DamagedBlock(Damage.LENGTH, "shorter than any header")
    if not beginning.startswith(MAGIC, LENGTH_BYTES):
        raise DamagedBlock(Damage.HEADER, "not a kvstrata block")
    if not beginning.startswith(OPENING, LENGTH_BYTES):
        raise DamagedBlock(Damage.VERSION, f"format {_version_of(beginning)}")
    length = LENGTH_BYTES + int.from_bytes(beginning[:LENGTH_BYTES], "little")
    if length % ALIGNMENT_BYTES or length > LARGEST_HEADER_BYTES:
        raise DamagedBlock(Damage.HEADER, f"a header of {length} bytes")
    return length


def _version_of(beginning: bytes) -> str:
    digits = re.match(rb"[0-9]{1,9}", beginning[LENGTH_BYTES + len(MAGIC) :])
    return digits.group().decode() if digits else "unknown"


def parse_header(header: bytes) -> BlockHeader:
    """Parse and verify a header of exactly `header_bytes_of(...)` bytes."""
    stored = header[CHECKSUM_AT:CHECKSUM_ENDS]
    blank = header[:CHECKSUM_AT] + b"0" * NUM_DIGITS + header[CHECKSUM_ENDS:]
    if blake3(blank).hexdigest().encode() != stored:
        raise DamagedBlock(Damage.HEADER, "the header's checksum is another")
    try:
        return _read_header(json.loads(header[LENGTH_BYTES:]), len(header))
    except (KeyError, TypeError, ValueError) as error:
        # The checksum is right: another program wrote the header under this format version.
        raise DamagedBlock(Damage.HEADER, f"the header makes no sense: {error!r}") from error


def _read_header(fields: dict[str, Any], header_bytes: int) -> BlockHeader:
    metadata = fields.pop("__metadata__")
    ranges = {name: _range_of(entry, metadata[f"checksum.{name}"], header_bytes) for name, entry in fields.items()}
    token_ids = base64.b64decode(metadata["token_ids"], validate=True)
    if len(token_ids) != 4 * int(metadata["num_tokens"]):
        raise ValueError("num_tokens is not how many token ids there are")
    return BlockHeader(
        id=BlockId(bytes.fromhex(metadata["key"]), metadata["part"]),
        parent=bytes.fromhex(metadata["parent"]),
        root=bytes.fromhex(metadata["root"]),
        start=int(metadata["start"]),
        token_ids=token_ids,
        description=json.loads(metadata["description"]),
        ranges=ranges,
        header_bytes=header_bytes,
        file_bytes=max((range_.offset + range_.nbytes for range_ in ranges.values()), default=header_bytes),
    )


def _range_of(entry: Mapping[str, Any], checksum: str, header_bytes: int) -> TensorRange:
    begin, end = entry["data_offsets"]
    return TensorRange(entry["dtype"], tuple(entry["shape"]), header_bytes + begin, end - begin, checksum)


def verify_header(header: BlockHeader, *, wanted: BlockId, root: bytes | None, chain: Chain, size_bytes: int) -> None:
    """Verify that a header is that of the wanted block. `root` None: any root, for a check of the whole folder."""
    if header.id != wanted:
        raise DamagedBlock(Damage.KEY, "the file holds another block than its name says")
    if root is not None and header.root != root:
        raise DamagedBlock(Damage.ROOT, "the block belongs to another model or salt")
    if key_of(chain, header.parent, header.token_ids) != header.id.key:
        raise DamagedBlock(Damage.TOKENS, "the token ids do not give the key")
    if size_bytes != header.file_bytes:
        raise DamagedBlock(Damage.LENGTH, f"{size_bytes} bytes instead of {header.file_bytes}")


def decode_tensor(name: str, range_: TensorRange, content: memoryview, *, verify: bool = True) -> BlockTensor:
    """Decode a tensor, and verify its checksum unless a seal has covered it."""
    if verify and not _matches(range_.checksum, content):
        raise DamagedBlock(Damage.TENSOR, f"the checksum of {name} is another")
    try:
        return BlockTensor(range_.dtype, range_.shape, content)
    except ValueError as error:
        raise DamagedBlock(Damage.HEADER, str(error)) from error


def decode_block(
    content: memoryview, wanted: BlockId | None, *, root: bytes | None, chain: Chain, verify_tensors: bool = True
) -> Block:
    """Decode a whole block. Raises DamagedBlock unless it is the wanted one, under this root; None: any.

    The content may come from an attacker. `verify_tensors` False skips the checksums of tensors, for content whose
    every byte a seal covers.
    """
    length = header_bytes_of(bytes(content[:ALIGNMENT_BYTES]))
    if content.nbytes < length:
        raise DamagedBlock(Damage.LENGTH, "the content ends in its header")
    try:
        header = parse_header(bytes(content[:length]))
        id_ = header.id if wanted is None else wanted
        verify_header(header, wanted=id_, root=root, chain=chain, size_bytes=content.nbytes)
        tensors = {
            name: decode_tensor(
                name, range_, content[range_.offset : range_.offset + range_.nbytes], verify=verify_tensors
            )
            for name, range_ in header.ranges.items()
            if range_.offset >= length
        }
        if len(tensors) != len(header.ranges):
            raise ValueError("a tensor is outside its block")
        if any(type(size) is not int for tensor in tensors.values() for size in tensor.shape):
            raise ValueError("a size is no integer")
        return header.block(tensors)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        # The checksums are correct, but no version of kvstrata writes such a header.
        raise DamagedBlock(Damage.HEADER, f"the header makes no sense: {type(error).__name__}") from error
