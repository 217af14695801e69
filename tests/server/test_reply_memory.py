"""What is remembered of replies: found by what comes back unchanged and by nothing else, within bounds, on any disk."""

from __future__ import annotations

import copy
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.server.chat import reply_files, reply_memory
from kvstrata.server.chat.reply_files import ReplyFiles, ReplyRecord, from_line, record_of, to_line
from kvstrata.server.chat.reply_memory import ReplyMemory
from kvstrata.text.sampled_reply import SampledReply, content_of_message

VOCAB = 1000
SCALARS = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
CALLS = st.builds(
    lambda id, name, arguments: {
        "id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}
    },
    st.text("abc123", min_size=1, max_size=9), st.sampled_from(["f", "g"]),
    st.dictionaries(st.text(max_size=3), VALUES, max_size=3),
)  # fmt: skip
MESSAGES = st.builds(
    lambda content, calls: {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})},
    st.text(max_size=12), st.lists(CALLS, max_size=2),
)  # fmt: skip
RECORDS = st.builds(
    lambda message, ids, opened: ReplyRecord.of(
        content_of_message(message), SampledReply(tuple(ids), len(ids) - 1, None, opened, b"")
    ),
    MESSAGES, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), st.booleans(),
)  # fmt: skip


def sampled(*ids: int) -> SampledReply:
    return SampledReply(ids, 0, 0)


def says_something(message: Any) -> bool:
    visible = content_of_message(message)
    return bool(visible.content or visible.calls)


@given(message=MESSAGES, other=MESSAGES)
def test_only_what_says_the_same_is_found(message: Any, other: Any) -> None:
    memory = ReplyMemory()
    memory.record_reply("salt", content_of_message(message), sampled(1, 2))
    same = content_of_message(message).digest == content_of_message(other).digest
    assert (memory.find_reply("salt", other) is not None) == (same and says_something(other))
    assert (memory.find_reply("salt", message) is not None) == says_something(message)
    assert memory.find_reply("pepper", message) is None


@given(message=MESSAGES.filter(says_something), edit=st.data())
def test_any_edit_makes_it_another(message: Any, edit: st.DataObject) -> None:
    memory = ReplyMemory()
    memory.record_reply("", content_of_message(message), sampled(1, 2))
    edited = copy.deepcopy(message)
    kinds = ["text"] + (["name", "argument", "drop", "order"] if "tool_calls" in message else ["add"])
    kind = edit.draw(st.sampled_from(kinds))
    calls = edited.setdefault("tool_calls", [])
    if kind == "text":
        at = edit.draw(st.integers(0, len(edited["content"])))
        letter = edit.draw(st.characters(exclude_categories=["Cs", "Zs", "Cc", "Zl", "Zp"]))
        edited["content"] = edited["content"][:at] + letter + edited["content"][at:]
    elif kind == "name":
        calls[0]["function"]["name"] += "x"
    elif kind == "argument":
        arguments = json.loads(calls[0]["function"]["arguments"])
        calls[0]["function"]["arguments"] = json.dumps({**arguments, "a new one": edit.draw(VALUES)})
    elif kind == "drop":
        calls.pop()
    elif kind == "order" and len(calls) == 2:
        calls.reverse()
        if content_of_message(edited).digest == content_of_message(message).digest:
            return  # both are the same
    else:
        calls.append({"id": "new", "function": {"name": "f", "arguments": "{}"}})
    assert memory.find_reply("", edited) is None


def test_arguments_are_compared_as_json() -> None:
    def message(arguments: Any) -> Any:
        call = {"id": "one", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    memory = ReplyMemory()
    memory.record_reply("", content_of_message(message('{"a":1.0,"b":[true,{"c":"\\u00fc"}]}')), sampled(5))
    assert memory.find_reply("", message('{"b": [true, {"c": "ü"}], "a": 1}')) is not None
    assert memory.find_reply("", message({"a": 1, "b": [True, {"c": "ü"}]})) is not None
    assert memory.find_reply("", message('{"a":1,"b":[1,{"c":"ü"}]}')) is None
    assert memory.find_reply("", message('{"a":1,"b":[true,{"c":"ü"}]')) is None
    memory.record_reply("", content_of_message(message('{"a": ')), sampled(6))
    assert memory.find_reply("", message('{"a": ')) == sampled(6)


def test_the_id_of_a_call_tells_two_that_say_the_same_apart() -> None:
    def message(id: str) -> Any:
        call = {"id": id, "function": {"name": "f", "arguments": "{}"}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    memory = ReplyMemory()
    memory.record_reply("", content_of_message(message("one")), sampled(1))
    memory.record_reply("", content_of_message(message("two")), sampled(2))
    assert memory.find_reply("", message("one")) == sampled(1)
    assert memory.find_reply("", message("two")) == sampled(2)
    assert memory.find_reply("", message("renamed")) == sampled(2)  # the newest


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_memory_is_bounded_and_the_newest_stays(lengths: list[int]) -> None:
    memory = ReplyMemory(max_tokens=700)
    for number, length in enumerate(lengths):
        message = {"role": "assistant", "content": f"reply {number}"}
        memory.record_reply("", content_of_message(message), sampled(*range(length)))
        assert memory.num_tokens <= 700
        assert memory.find_reply("", message) == sampled(*range(length))


def test_short_replies_take_no_more_memory_than_long_ones() -> None:
    tracemalloc.start()
    try:
        memory = ReplyMemory(max_tokens=1 << 20)
        for number in range(8000):
            memory.record_reply("", content_of_message({"role": "assistant", "content": f"{number}"}), sampled(1))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 4 << 20
    assert memory.find_reply("", {"role": "assistant", "content": "7999"}) is not None


@given(record=RECORDS, damage=st.data())
def test_a_line_is_what_it_was_or_nothing(record: ReplyRecord, damage: st.DataObject) -> None:
    line = to_line(record, 0.0)
    assert from_line(line, VOCAB) == record
    at = damage.draw(st.integers(0, len(line) - 2))
    flipped = bytes([line[at] ^ damage.draw(st.integers(1, 255))])
    assert from_line(line[:at] + flipped + line[at + 1 :], VOCAB) in (None, record)
    assert from_line(line[:at], VOCAB) is None


HOSTILE: list[Any] = [
    None, [], {}, "x", {"ids": 3}, {"ids": "AAAA"},
    {"visible": "00" * 16, "calls": [], "ids": "", "visible_from": 0, "text_from": 0, "opened": False,
     "thought": "", "proven": True},
    {"visible": "00" * 16, "calls": [1], "ids": "AQAAAA==", "visible_from": 0, "text_from": 0, "opened": False,
     "thought": "", "proven": True},
    {"visible": "00" * 16, "calls": [], "ids": "AQAAAA==", "visible_from": 9, "text_from": 0, "opened": False,
     "thought": "", "proven": True},
    {"visible": "00" * 16, "calls": [], "ids": "/////w==", "visible_from": 0, "text_from": 0, "opened": False,
     "thought": "", "proven": True},
    {"visible": "00", "calls": [], "ids": "AQAAAA==", "visible_from": 0, "text_from": 0, "opened": False,
     "thought": "", "proven": True},
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_what_was_never_written_here_is_no_record(value: Any) -> None:
    assert record_of(value, VOCAB) is None


def open_files(folder: Path, fingerprint: str = "model") -> ReplyFiles:
    return ReplyFiles(folder, fingerprint, VOCAB)


SAID: Any = {"role": "assistant", "content": "All is well."}


def test_files_bring_replies_back_to_the_same_salt_and_model_only(tmp_path: Path) -> None:
    memory = ReplyMemory(open_files(tmp_path))
    memory.record_reply("key:salt", content_of_message(SAID), sampled(1, 2, 3))
    memory.close()
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    assert ReplyMemory(open_files(tmp_path)).find_reply("key:salt", SAID) == sampled(1, 2, 3)
    assert ReplyMemory(open_files(tmp_path)).find_reply("key", SAID) is None
    assert ReplyMemory(open_files(tmp_path, "other")).find_reply("key:salt", SAID) is None


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    memory = ReplyMemory(open_files(tmp_path))
    memory.record_reply("", content_of_message(SAID), sampled(1))
    memory.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + path.read_bytes()[:30])
    later = {"role": "assistant", "content": "Later."}
    memory = ReplyMemory(open_files(tmp_path))
    memory.record_reply("", content_of_message(later), sampled(2))
    memory.close()
    found = ReplyMemory(open_files(tmp_path))
    assert found.find_reply("", SAID) == sampled(1)
    assert found.find_reply("", later) == sampled(2)


def test_what_was_said_since_the_start_is_newer_than_the_file(tmp_path: Path) -> None:
    memory = ReplyMemory(open_files(tmp_path))
    memory.record_reply("", content_of_message(SAID), sampled(1))
    memory.close()
    memory = ReplyMemory(open_files(tmp_path))
    memory.record_reply("", content_of_message(SAID), sampled(2))
    assert memory.find_reply("", SAID) == sampled(2)
    memory.close()


def test_clearing_an_owner_leaves_the_others(tmp_path: Path) -> None:
    memory = ReplyMemory(open_files(tmp_path))
    for salt in ("a", "a:one", "b"):
        memory.record_reply(salt, content_of_message(SAID), sampled(1))
    memory.clear(None, "a")
    assert [memory.find_reply(salt, SAID) is not None for salt in ("a", "a:one", "b")] == [False, False, True]
    memory.close()
    found = ReplyMemory(open_files(tmp_path))
    assert [found.find_reply(salt, SAID) is not None for salt in ("a", "a:one", "b")] == [False, False, True]
    found.close()


def test_what_was_not_said_or_sent_back_lately_expires_in_memory_and_files(tmp_path: Path) -> None:
    now_s = 1000.0
    files = ReplyFiles(tmp_path, "model", VOCAB, clock=lambda: now_s)
    memory = ReplyMemory(files, clock=lambda: now_s)
    later = {"role": "assistant", "content": "Later."}
    memory.record_reply("", content_of_message(SAID), sampled(1))
    memory.record_reply("another", content_of_message(SAID), sampled(3))
    now_s = 2000.0
    memory.record_reply("", content_of_message(later), sampled(2))
    memory.expire(1500.0)
    assert [memory.find_reply("", each) for each in (SAID, later)] == [None, sampled(2)]
    assert memory.find_reply("another", SAID) is None
    memory.close()
    found = ReplyMemory(open_files(tmp_path))
    assert [found.find_reply("", each) for each in (SAID, later)] == [None, sampled(2)]
    found.expire(3000.0 + time.time())
    found.close()
    assert not list(tmp_path.iterdir())


def test_clearing_leaves_no_file_and_brings_none_back(tmp_path: Path) -> None:
    """Files that a crash left half written go too, and what is cleared is not read again."""
    memory = ReplyMemory(open_files(tmp_path))
    memory.record_reply("", content_of_message(SAID), sampled(1))
    memory.close()
    memory = ReplyMemory(open_files(tmp_path))
    (tmp_path / "half.new").write_bytes(b"rest")
    memory.clear(None, None)
    assert not list(tmp_path.iterdir())
    assert memory.find_reply("", SAID) is None
    memory.close()


def test_a_long_file_keeps_its_newer_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_files, "MAX_FILE_BYTES", 2000)
    memory = ReplyMemory(open_files(tmp_path))
    said = [{"role": "assistant", "content": f"reply {number}"} for number in range(40)]
    for message in said:
        memory.record_reply("", content_of_message(message), sampled(7))
    memory.close()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size <= 2000
    found = ReplyMemory(open_files(tmp_path))
    assert found.find_reply("", said[-1]) is not None
    assert found.find_reply("", said[0]) is None


def test_the_folder_is_bounded_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_files, "MAX_FILE_BYTES", 2000)
    monkeypatch.setattr(reply_files, "MAX_FOLDER_BYTES", 8000)
    memory = ReplyMemory(open_files(tmp_path))
    for number in range(100):
        memory.record_reply(f"salt {number}", content_of_message(SAID), sampled(7))
    memory.close()
    assert 4000 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8000 + 2000 + 500


def test_salts_that_clients_make_up_are_not_all_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_memory, "MAX_SALTS", 10)
    memory = ReplyMemory(open_files(tmp_path))
    memory.record_reply("salt 0", content_of_message(SAID), sampled(7))
    found = [memory.find_reply(f"salt {number}", SAID) for number in range(50)]
    assert found[0] == memory.find_reply("salt 0", SAID) == sampled(7)
    assert len(memory._read) == 10
    memory.close()


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    memory = ReplyMemory(open_files(blocked / "replies"))
    memory.record_reply("", content_of_message(SAID), sampled(1))
    assert memory.find_reply("", SAID) == sampled(1)
    memory.close()
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("linked", ["folder", "file"])
def test_links_in_place_of_the_folder_or_a_file_are_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, linked: str
) -> None:
    folder, elsewhere = tmp_path / "replies", tmp_path / "elsewhere"
    memory = ReplyMemory(open_files(folder))
    memory.record_reply("", content_of_message(SAID), sampled(1))
    memory.close()
    (path,) = folder.iterdir()
    moved = folder if linked == "folder" else path
    moved.rename(elsewhere)
    moved.symlink_to(elsewhere)
    before = path.read_bytes()

    memory = ReplyMemory(open_files(folder))
    assert memory.find_reply("", SAID) is None
    memory.record_reply("", content_of_message(SAID), sampled(2))
    memory.clear(None, None, only_files=True)
    memory.close()

    assert elsewhere.exists()
    assert linked == "file" or path.read_bytes() == before
    assert "cannot be kept" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_folder_of_another_user_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "replies"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    memory = ReplyMemory(open_files(folder))
    memory.record_reply("", content_of_message(SAID), sampled(1))
    memory.close()
    assert list(folder.iterdir()) == []
    assert "belongs to user id 12345" in caplog.text
