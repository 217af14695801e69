"""The publisher without a server: its messages, its subscribers, and replay for late ones."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import ConfigError
from kvstrata.events import feed
from kvstrata.events import publisher as publisher_module
from kvstrata.events.blocks import (
    AllBlocksCleared,
    BlockNumbers,
    BlockRemoved,
    BlockStored,
    Event,
    ReportedBlocks,
    message_body,
)
from kvstrata.events.feed import GRAIN, ListenerThread
from kvstrata.events.options import Address, EventOptions, bind_events, event_options, parse_address
from kvstrata.events.publisher import EventPublisher, EventSockets
from kvstrata.metrics import Metrics
from kvstrata.prefix_cache.keys import TokenIds
from tests.events.subscriber import Subscriber, subscribed

ROOT, OTHER_ROOT = bytes(32), bytes([1]) * 32
FREE = Address("127.0.0.1", 0)


def ids_of(*numbers: int) -> TokenIds:
    """A block for each number, and three tokens more."""
    return np.array([token for number in numbers for token in range(number, number + GRAIN)] + [1, 2, 3], np.int32)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    one = EventPublisher(EventSockets(EventOptions(FREE, FREE, "")))
    yield one
    one.close()


@pytest.fixture
def subscriber(publisher: EventPublisher) -> Iterator[Subscriber]:
    with subscribed(publisher.publish_url, publisher.replay_url) as one:
        yield one


def test_events_of_a_moment_come_in_one_message(publisher: EventPublisher, subscriber: Subscriber) -> None:
    subscriber.ask_missed(0)  # so that it is connected
    for number in range(0, 2000, 100):
        publisher.stored(ROOT, ids_of(number, number + 20), 0)
    subscriber.wait_until(lambda: len(subscriber.blocks) == 40)
    assert len(subscriber.sequences) < 5


def test_who_asks_for_what_is_not_kept_any_more_gets_all_that_holds(
    publisher: EventPublisher, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "KEPT_MESSAGES", 2)
    publisher.stored(ROOT, ids_of(0, 100, 200), 0)
    publisher.stored(ROOT, ids_of(0, 100, 300), 2 * GRAIN)
    publisher.stored(OTHER_ROOT, ids_of(0, 100), 0)
    for number in range(6):
        publisher.stored(ROOT, ids_of(1000 + number), 0)
        publisher.removed(ROOT, ids_of(1000 + number), 0)
        subscriber.ask_missed(1 << 40)  # publishes what waits
    with subscribed(publisher.publish_url, publisher.replay_url) as late:
        (number,) = late.ask_missed(0)
        assert late.ask_missed(number) == [number]
        assert late.ask_missed(number + 1) == []
        tokens = sorted(late.blocks.values())
    first, second, third, fourth = (tuple(ids_of(start)[:GRAIN].tolist()) for start in (0, 100, 200, 300))
    both = [first, first, first + second, first + second, first + second + third, first + second + fourth]
    assert tokens == sorted(both)


def test_blocks_of_other_salts_have_other_numbers() -> None:
    numbers = BlockNumbers()
    assert not {*numbers.numbers_of(ROOT, ids_of(0, 100))} & {*numbers.numbers_of(OTHER_ROOT, ids_of(0, 100))}


def test_a_malformed_replay_request_gets_no_reply_and_costs_nothing(
    publisher: EventPublisher, subscriber: Subscriber
) -> None:
    import zmq

    publisher.stored(ROOT, ids_of(0), 0)
    asks = subscriber._context.socket(zmq.DEALER)
    asks.connect(publisher.replay_url)
    for question in ([b""], [b"", b"12"], [b"", b"12345678", b"more"], [b"12345678"]):
        asks.send_multipart(question)
    assert subscriber.ask_missed(0) == [0]
    assert not asks.poll(0)
    asks.close()


def test_what_was_given_up_is_told_when_it_is_asked_for_again(
    publisher: EventPublisher, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics()
    monkeypatch.setattr(feed, "MAX_WAITING_BYTES", 100)
    hears = ListenerThread([publisher], on_dropped=metrics.events.lost.inc)
    for _ in range(3):
        hears.stored(ROOT, ids_of(0, 100), 0)  # more than may wait
    monkeypatch.setattr(feed, "MAX_WAITING_BYTES", 1 << 20)
    hears.stored(ROOT, ids_of(0, 100, 200), 2 * GRAIN)
    hears.close()
    subscriber.ask_missed(0)
    assert len(subscriber.blocks) == 3
    assert metrics.registry.get_sample_value("kvstrata_kv_events_lost_total") == 3


def test_closing_twice_and_telling_after_the_end_do_nothing() -> None:
    one = EventPublisher(EventSockets(EventOptions(FREE, FREE, "")))
    one.stored(ROOT, ids_of(0), 0)
    one.close()
    one.close()
    one.stored(ROOT, ids_of(5), 0)
    assert not one._thread.is_alive()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=30))
def test_all_that_holds_told_again_is_what_the_events_left(steps: list[tuple[bool, list[int]]]) -> None:
    """Whatever was stored and went: both ways to know agree."""
    blocks, numbers = ReportedBlocks(), BlockNumbers()
    by_events: dict[int, int | None] = {}
    for is_stored, path in steps:
        ids = ids_of(*(100 * number for number in path))
        of_path = numbers.numbers_of(ROOT, ids)
        if is_stored:
            follow(by_events, blocks.add_blocks(of_path, ids))
        elif not {*of_path[-1:]} & {*by_events.values()}:  # a leaf: only those go
            follow(by_events, blocks.remove_blocks(of_path, (len(path) - 1) * GRAIN))
    again: dict[int, int | None] = {1: None}
    for event in blocks.replay_all():
        follow(again, event)
    assert again == by_events
    assert len(blocks) == len(again)


def follow(known: dict[int, int | None], event: Event | None) -> None:
    match event:
        case BlockStored():
            parent = event.parent
            assert parent is None or parent in known
            for number in event.numbers:
                known[number], parent = parent, number
        case BlockRemoved():
            for number in event.numbers:
                del known[number]
        case AllBlocksCleared():
            known.clear()


def test_the_form_on_the_wire_is_that_of_vllm() -> None:
    events = [AllBlocksCleared(), BlockStored([7, 1 << 63], None, list(range(32))), BlockRemoved([7])]
    assert msgpack.unpackb(message_body(1.5, events)) == [
        1.5,
        [
            ["AllBlocksCleared"],
            ["BlockStored", [7, 1 << 63], None, list(range(32)), 16, None, "GPU", None],
            ["BlockRemoved", [7], "GPU"],
        ],
        0,
    ]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("tcp://127.0.0.1:5557", "127.0.0.1", 5557), ("tcp://[::1]:0", "::1", 0), ("tcp://*:1", "*", 1)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)
    assert parse_address(text).url == text


@pytest.mark.parametrize("text", ["", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://:5", "tcp://h:70000", "ipc:///tmp/x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-events: .* Write it like tcp://127"):
        parse_address(text)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://10.0.0.1:5557", "tcp://somewhere:5557"]
)
def test_others_can_reach_events_only_where_there_is_a_key(address: str) -> None:
    assert event_options(address, "", has_keys=True).replay.port == 5558
    with pytest.raises(ConfigError, match=r"--kv-events tcp.* has no key: events carry"):
        event_options(address, "", has_keys=False)


def test_an_address_in_use_ends_the_start_before_a_model_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        main = "from kvstrata.cli import main; main()"
        serve = [sys.executable, "-c", main, "serve", "nobody/no-model", "--port", "0"]
        ended = subprocess.run([*serve, "--kv-events", taken], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert f"--kv-events: {taken} is in use. Stop the other program" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_the_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ConfigError, match=r"not installed \(msgpack\): pip install 'kvstrata\[events\]'"):
        bind_events(EventOptions(FREE, FREE, ""))
