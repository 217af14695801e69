"""Replies as they were sampled, found by the message that a client sends back, so that prompts repeat them token for
token. Bounded; separate for each salt.

A reply is found by the id of its first call together with its content, or by its content alone; the newest of equal
ones wins. Safe from any thread. A salt's file beside the disk cache, if there is one, is read once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from blake3 import blake3

from kvstrata.engine.cache_api import TokenIds, owner_of
from kvstrata.server.chat.reply_files import ReplyFiles, ReplyRecord, record_of
from kvstrata.text.messages import Message
from kvstrata.text.reply_events import ReplyEvent, ToolCallEnd, ToolCallStart
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.sampled_reply import ReplyContent, SampledReply, content_of_message, content_of_reply

MAX_TOKENS = 4 << 20  # total ids of all replies: 16 MiB
# Overhead of a reply, counted as tokens, so that many short replies do not take more memory than a few long ones.
ENTRY_TOKENS = 192
MAX_SALTS = 10_000  # clients choose salts freely
ID_BYTES = 4
Key = bytes

NAMED, SAID = b"call", b"said"


class ReplyMemory:
    """Remembered replies of all salts."""

    def __init__(
        self,
        files: ReplyFiles | None = None,
        max_tokens: int = MAX_TOKENS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._max_tokens = max_tokens
        self._lock = threading.Lock()  # guards the fields below
        self._records: OrderedDict[Key, tuple[str, ReplyRecord]] = OrderedDict()  # with the salt; newest last
        self._used_s: dict[Key, float] = {}  # since the epoch
        self._clock = clock
        self._num_tokens = 0
        self._read: OrderedDict[str, None] = OrderedDict()  # salts whose file was read

    def find_reply(self, salt: str, message: Message) -> SampledReply | None:
        """Return the reply that an assistant message repeats unchanged, or None."""
        visible = content_of_message(message)
        if not (visible.content or visible.calls):
            return None
        self._read_once(salt)
        call_ids = tuple(call.id for call in visible.calls)
        with self._lock:
            for key in _keys(salt, visible.digest, call_ids):
                if key in self._records:
                    self._records.move_to_end(key)
                    self._used_s[key] = self._clock()
                    return self._records[key][1].sampled
        return None

    def record_reply(self, salt: str, visible: ReplyContent, sampled: SampledReply) -> None:
        record = ReplyRecord.of(visible, sampled)
        with self._lock:
            self._keep(salt, record)
        if self._files is not None:
            self._files.append(salt, record)

    def import_session(self, salt: str, section: Iterable[Any], vocab_size: int) -> None:
        """Add the valid records of an imported conversation. The file is untrusted: whether ids match their text is
        verified when a client sends such a reply, because only then are the tools known too."""
        for value in section:
            record = record_of(value, vocab_size)
            if record is None:
                continue
            claimed = replace(record, is_proven=False)
            with self._lock:
                self._keep(salt, claimed)
            if self._files is not None:
                self._files.append(salt, claimed)

    def export_session(self, salt: str, ids: TokenIds) -> list[Mapping[str, Any]]:
        """Return the replies whose tokens a conversation contains, with their thinking or without, oldest first."""
        self._read_once(salt)
        held = np.asarray(ids, dtype="<i4").tobytes()
        with self._lock:
            records = {id(record): record for its_salt, record in self._records.values() if its_salt == salt}
        return [record.to_json() for record in records.values() if _has_run(held, _visible_bytes(record))]

    def clear(self, salt: str | None, owner: str | None, *, only_files: bool = False) -> None:
        """Remove replies under a salt, under all salts of an owner, or all. Files are deleted first, so that none is
        read again in between."""
        if self._files is not None:
            self._files.clear(salt, owner)
        with self._lock:
            for key, (its_salt, _) in () if only_files else list(self._records.items()):
                if (salt is None or its_salt == salt) and (owner is None or owner_of(its_salt) == owner):
                    self._drop(key)

    def expire(self, before_s: float) -> None:
        """Remove the replies that were last recorded or sent back before a time; from files, those recorded before
        it."""
        with self._lock:
            while self._records and self._used_s[oldest := next(iter(self._records))] < before_s:
                self._drop(oldest)
        if self._files is not None:
            self._files.expire(before_s)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    @property
    def num_tokens(self) -> int:
        """Size of all replies, in tokens, overhead included."""
        with self._lock:
            return self._num_tokens

    def _read_once(self, salt: str) -> None:
        if self._files is None:
            return
        with self._lock:
            if salt in self._read:
                return
            self._read[salt] = None
            if len(self._read) > MAX_SALTS:
                self._read.popitem(last=False)
        records = self._files.read(salt)
        with self._lock:
            newer = list(self._records.items())
            for record in records:
                self._keep(salt, record)
            for key, (its_salt, record) in newer:  # replies from after the start stay the newest
                if its_salt == salt and self._records.get(key, (salt, record))[1] is not record:
                    self._put(key, salt, record)

    def _keep(self, salt: str, record: ReplyRecord) -> None:
        for key in _keys(salt, record.visible, record.call_ids):
            self._put(key, salt, record)
        while self._num_tokens > self._max_tokens and len(self._records) > 1:
            self._drop(next(iter(self._records)))

    def _put(self, key: Key, salt: str, record: ReplyRecord) -> None:
        if key in self._records:
            self._drop(key)
        self._records[key] = (salt, record)
        self._used_s[key] = self._clock()
        self._num_tokens += ENTRY_TOKENS + len(record.ids)

    def _drop(self, key: Key) -> None:
        _, record = self._records.pop(key)
        del self._used_s[key]
        self._num_tokens -= ENTRY_TOKENS + len(record.ids)


def _keys(salt: str, digest: bytes, call_ids: tuple[str, ...]) -> list[Key]:
    named = [_key(salt, NAMED, digest, call_ids[0])] if call_ids and call_ids[0] else []
    return [*named, _key(salt, SAID, digest, "")]


def _key(salt: str, kind: bytes, digest: bytes, call_id: str) -> Key:
    hashed = blake3(kind + digest)
    for text in (salt, call_id):
        encoded = text.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "little") + encoded)
    return hashed.digest(16)


def _visible_bytes(record: ReplyRecord) -> bytes:
    return np.array(record.ids[record.visible_from or 0 :], dtype="<i4").tobytes()


def _has_run(held: bytes, ids: bytes) -> bool:
    at = held.find(ids)
    while at > 0 and at % ID_BYTES:
        at = held.find(ids, at + 1)
    return at >= 0


@dataclass(frozen=True)
class SampledReplies:
    """The memory of replies as one model writes them. `ending_ids` end a reply and are not recorded."""

    memory: ReplyMemory
    form: ReplyFormat
    ending_ids: frozenset[int]

    def find_reply(self, salt: str, message: Message, tools: Sequence[dict[str, Any]] | None) -> SampledReply | None:
        """Return the remembered reply that a message repeats. A reply from an imported conversation is parsed first to
        verify that its ids have this text: anyone may have written the file."""
        if message.get("role") != "assistant":
            return None
        found = self.memory.find_reply(salt, message)
        if found is None or found.is_proven:
            return found
        visible = content_of_message(message)
        proven = self.form.proven(found, visible, tools or ())
        if proven is not None:
            self.memory.record_reply(salt, visible, proven)
        return proven

    def record_reply(
        self, salt: str, prompt: tuple[int, ...], ids: Sequence[int], events: Iterable[ReplyEvent]
    ) -> None:
        """Record a reply to a prompt. `ids`: the tokens that the client received; `events`: the same, parsed."""
        parsed = list(events)
        begun, ended = (sum(isinstance(event, kind) for event in parsed) for kind in (ToolCallStart, ToolCallEnd))
        visible = content_of_reply(parsed)
        if begun != ended or not (visible.content or visible.calls):
            return  # cut off inside a call, or nothing that a client would send back
        shown = list(ids)
        while shown and shown[-1] in self.ending_ids:
            shown.pop()
        if not shown:
            return
        sampled = self.form.sampled(shown, visible, prompt)
        self.memory.record_reply(salt, visible, sampled)
        # aider trims replies before it sends them back.
        if (trimmed := self.form.trimmed(sampled, visible)) is not None:
            self.memory.record_reply(salt, replace(visible, content=visible.content.strip()), trimmed)
