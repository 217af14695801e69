"""A remembered reply, in memory and as a line of a file. Independent of salts and files.

    4f0c...  {"said": 1767225600, "visible": "9a1b...", "calls": ["3f2a91c0d"], "ids": "<base64 of int32>", ...}

A line is a checksum, a space and JSON. A damaged line is ignored.
"""

from __future__ import annotations

import base64
import binascii
import json
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from kvstrata.text.sampled_reply import DIGEST_BYTES, ReplyContent, SampledReply

CHECKSUM_BYTES = 8
MAX_CALLS = 1024
MAX_ID_CHARS = 256


@dataclass(frozen=True)
class Record:
    visible: bytes  # digest of the visible reply
    call_ids: tuple[str, ...]
    ids: array[int]  # a tenth of a tuple's size
    visible_from: int | None
    text_from: int | None
    opened: bool
    thought: bytes
    is_proven: bool = True

    @classmethod
    def of(cls, visible: ReplyContent, sampled: SampledReply) -> Record:
        return cls(
            visible.digest,
            tuple(call.id for call in visible.calls),
            array("i", sampled.ids),
            sampled.visible_from,
            sampled.text_from,
            sampled.opened,
            sampled.thought,
            sampled.is_proven,
        )

    @property
    def sampled(self) -> SampledReply:
        places = (self.visible_from, self.text_from)
        return SampledReply(tuple(self.ids), *places, self.opened, self.thought, self.is_proven)

    def to_json(self) -> dict[str, Any]:
        ids = np.array(self.ids, dtype="<i4").tobytes()
        return {
            "visible": self.visible.hex(),
            "calls": list(self.call_ids),
            "ids": base64.b64encode(ids).decode("ascii"),
            "visible_from": self.visible_from,
            "text_from": self.text_from,
            "opened": self.opened,
            "thought": self.thought.hex(),
            "proven": self.is_proven,
        }


def record_of(value: Any, vocab_size: int) -> Record | None:
    """Return the record of a JSON value, or None if it is not valid for this model: the file may be untrusted."""
    try:
        ids = array("i", np.frombuffer(base64.b64decode(value["ids"], validate=True), dtype="<i4").tolist())
        record = Record(
            bytes.fromhex(value["visible"]),
            tuple(value["calls"]),
            ids,
            value["visible_from"],
            value["text_from"],
            value["opened"],
            bytes.fromhex(value["thought"]),
            value["proven"],
        )
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None
    return record if _is_sound(record, vocab_size) else None


def to_line(record: Record, said_s: float) -> bytes:
    """Return the record as a line. `said_s`: time of the reply, since the epoch."""
    text = json.dumps({"said": int(said_s), **record.to_json()}, separators=(",", ":")).encode()
    return _checksum(text) + b" " + text + b"\n"


def from_line(line: bytes, vocab_size: int) -> Record | None:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not text or checksum != _checksum(text):
        return None
    try:
        return record_of(json.loads(text), vocab_size)
    except (ValueError, RecursionError):
        return None


def said_s(line: bytes) -> float:
    """Return the time at which a reply was recorded, or 0 if the line has none."""
    try:
        value = json.loads(line.partition(b" ")[2])["said"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return 0.0
    return float(value) if isinstance(value, int) else 0.0


def _checksum(text: bytes) -> bytes:
    return blake3(text).hexdigest(CHECKSUM_BYTES).encode()


def _is_sound(record: Record, vocab_size: int) -> bool:
    places = (record.visible_from, record.text_from)
    return (
        len(record.visible) == DIGEST_BYTES
        and len(record.thought) in (0, DIGEST_BYTES)
        and len(record.ids) > 0
        and min(record.ids) >= 0
        and max(record.ids) < vocab_size
        and all(place is None or (type(place) is int and 0 <= place <= len(record.ids)) for place in places)
        and type(record.opened) is bool
        and type(record.is_proven) is bool
        and len(record.call_ids) <= MAX_CALLS
        and all(isinstance(id, str) and len(id) <= MAX_ID_CHARS for id in record.call_ids)
    )
