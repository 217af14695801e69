"""Responses that are kept: bounded in number and bytes, each for its own key."""

from __future__ import annotations

from kvstrata.server.responses.store import ResponseStore, StoredResponse


def response(name: str, owner: str = "a", num_bytes: int = 10) -> StoredResponse:
    return StoredResponse(name, owner, b"x" * num_bytes, b"", (f"item of {name}",))


def test_the_least_recently_used_go() -> None:
    stored = ResponseStore(max_responses=2)
    stored.keep(response("1"))
    stored.keep(response("2"))
    assert stored.find("1", "a")
    stored.keep(response("3"))
    assert [bool(stored.find(name, "a")) for name in "123"] == [True, False, True]
    assert stored.find_with_item("item of 2", "a") is None
    assert stored.find_with_item("item of 3", "a") == response("3")
    assert (len(stored), stored.num_bytes) == (2, 20)


def test_bytes_are_bounded() -> None:
    stored = ResponseStore(max_bytes=100)
    for name in "123":
        stored.keep(response(name, num_bytes=45))
    assert (len(stored), stored.num_bytes) == (2, 90)
    stored.keep(response("huge", num_bytes=101))
    assert stored.find("huge", "a") is None
    assert len(stored) == 2  # and nobody went for it
    stored.keep(response("large", num_bytes=100))
    assert (len(stored), stored.num_bytes) == (1, 100)


def test_clearing_keeps_to_its_salt_and_owner() -> None:
    stored = ResponseStore()
    for salt in ("a", "a:x", "b"):
        stored.keep(response(salt, owner=salt))
    stored.clear("a:x", None)
    assert [bool(stored.find(name, None)) for name in ("a", "a:x", "b")] == [True, False, True]
    stored.clear(None, "a")
    assert [bool(stored.find(name, None)) for name in ("a", "b")] == [False, True]
    stored.clear(None, None)
    assert (len(stored), stored.num_bytes) == (0, 0)


def test_what_no_request_used_expires() -> None:
    now_s = 0.0
    stored = ResponseStore(clock=lambda: now_s)
    stored.keep(response("1"))
    stored.keep(response("2"))
    now_s = 10.0
    assert stored.find("1", "a")
    stored.expire(5.0)
    assert [bool(stored.find(name, "a")) for name in "12"] == [True, False]
    stored.expire(11.0)
    assert (len(stored), stored.num_bytes) == (0, 0)


def test_another_key_finds_nothing() -> None:
    stored = ResponseStore()
    stored.keep(response("1", owner="a"))
    assert stored.find("1", "b") is None
    assert stored.find_with_item("item of 1", "b") is None
    assert not stored.remove("1", "b")
    assert stored.find("1", None) == response("1")  # an admin
    assert stored.find_to_continue("1", "b") is None
    assert stored.remove("1", "a")
    assert not stored.remove("1", "a")
    assert (len(stored), stored.num_bytes) == (0, 0)
    assert stored.find_with_item("item of 1", "a") is None


def test_a_request_under_another_salt_of_the_key_continues_nothing() -> None:
    stored = ResponseStore()
    stored.keep(response("1", owner="a:x"))
    for other in ("a", "a:y", "b:x"):
        assert stored.find_to_continue("1", other) is None
        assert stored.find_with_item("item of 1", other) is None
    assert stored.find_to_continue("1", "a:x") == stored.find_with_item("item of 1", "a:x") == response("1", "a:x")
    assert stored.find("1", "a") == response("1", "a:x")  # its key may read it
