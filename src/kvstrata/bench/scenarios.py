"""The nine scenarios of `kvstrata bench compare` as data: the same prompts for every server. Nothing is sent here.

A scenario is a list of steps. Each request of a step has a part in the figures:

setup      only fills the cache
counted    its tokens count
timed      its tokens and its time to first token count
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvstrata.bench.workloads import LoadRequest, LoadShape, Message, agent, chat_asks, system, text, user

Part = Literal["setup", "counted", "timed"]
Metric = Literal["first token", "throughput", "pause"]

CONVERSATIONS = 16  # in the scenario with too little memory for all of them
CONVERSATION_TOKENS = 600
STORY = "Tell a very long story about a river and a town. Give it many chapters, and never stop writing."


@dataclass(frozen=True)
class ScenarioRequest:
    ask: LoadRequest
    part: Part = "timed"


@dataclass(frozen=True)
class ConcurrentRequests:
    """Requests sent at the same moment, usually one."""

    requests: tuple[ScenarioRequest, ...]


@dataclass(frozen=True)
class StreamBesidePrompt:
    """A stream during which another request is sent, after some tokens of the stream."""

    stream: ScenarioRequest
    comes: ScenarioRequest
    after_tokens: int = 8


@dataclass(frozen=True)
class Restart:
    """Restart of the server, ended as its user would end it."""


Step = ConcurrentRequests | StreamBesidePrompt | Restart


@dataclass(frozen=True)
class Scenario:
    number: int
    title: str
    steps: tuple[Step, ...]
    metric: Metric = "first token"
    limit_tokens: int = 0  # capacity of the cache; 0: the server's default

    @property
    def requests(self) -> list[ScenarioRequest]:
        found: list[ScenarioRequest] = []
        for step in self.steps:
            if isinstance(step, ConcurrentRequests):
                found += step.requests
            elif isinstance(step, StreamBesidePrompt):
                found += (step.stream, step.comes)
        return found


@dataclass(frozen=True)
class PromptLengths:
    """Lengths and texts of prompts. `share` scales lengths: 1/4 with --quick. `key` makes texts that no server has
    seen."""

    share: float = 1.0
    key: str = "0"
    smallest: int = field(default=4, kw_only=True)

    def of(self, num_tokens: int) -> int:
        return max(self.smallest, round(self.share * num_tokens))

    def text(self, name: str, num_tokens: int) -> str:
        return text(f"{self.key} {name}", self.of(num_tokens))


def scenarios(lengths: PromptLengths) -> list[Scenario]:
    return [
        repeated(lengths),
        chat(lengths),
        alternating(lengths),
        at_once(lengths),
        restarted(lengths),
        crowded(lengths),
        unrelated(lengths),
        beside(lengths),
        tools(lengths),
    ]


def repeated(lengths: PromptLengths) -> Scenario:
    prompt = (user(lengths.text("1", 2000)),)
    steps = _alone(ScenarioRequest(LoadRequest(f"1 {n}", prompt, 8), "timed" if n else "counted") for n in range(3))
    return Scenario(1, "One prompt of 2,000 tokens, again, again", steps)


def chat(lengths: PromptLengths) -> Scenario:
    turns = [lengths.text(f"2 turn {n}", 150) for n in range(8)]
    asks = chat_asks("2", lengths.text("2 system", 200), turns, 16)
    return Scenario(2, "An 8-turn chat", _alone(_first_counted(asks)))


def alternating(lengths: PromptLengths) -> Scenario:
    """Build two alternating chats, an unrelated prompt, a third chat with the same system prompt, and the first chat
    again."""
    common = lengths.text("3 system", 400)
    one, two, three = (
        chat_asks(f"3 {name}", common, [lengths.text(f"3 {name} {n}", 250) for n in range(4)], 16) for name in "abc"
    )
    stranger = ScenarioRequest(LoadRequest("3 stranger", (user(lengths.text("3 stranger", 1000)),), 16), "counted")
    in_turns = [ask for pair in zip(one[:3], two[:3], strict=True) for ask in pair]
    rest = [ScenarioRequest(three[0]), ScenarioRequest(one[3])]
    steps = _alone([*_first_counted(in_turns), stranger, *rest])
    return Scenario(
        3, "Two chats alternating over one 400-token system prompt, a third after an unrelated prompt", steps
    )


def at_once(lengths: PromptLengths) -> Scenario:
    common = system(lengths.text("4 system", 1500))
    asks = [LoadRequest(f"4 {n}", (common, user(lengths.text(f"4 {n}", 40))), 16) for n in range(8)]
    return Scenario(
        4,
        "Eight requests at once over one 1,500-token prefix",
        (ConcurrentRequests(tuple(map(ScenarioRequest, asks))),),
    )


def restarted(lengths: PromptLengths) -> Scenario:
    turns = [lengths.text(f"5 turn {n}", 700 if n < 2 else 50) for n in range(3)]
    *before, after = chat_asks("5", lengths.text("5 system", 200), turns, 16)
    stored = _alone(ScenarioRequest(ask, "setup") for ask in before)
    return Scenario(
        5,
        "Restart, then the follow-up of a stored conversation",
        (*stored, Restart(), *_alone([ScenarioRequest(after)])),
    )


def crowded(lengths: PromptLengths) -> Scenario:
    def opening(n: int) -> tuple[Message, ...]:
        return (user(lengths.text(f"6 {n}", CONVERSATION_TOKENS)),)

    first = [ScenarioRequest(LoadRequest(f"6 {n}", opening(n), 8), "counted") for n in range(CONVERSATIONS)]
    second = [
        ScenarioRequest(LoadRequest(f"6 {n}", (user(lengths.text(f"6 {n} more", 40)),), 8))
        for n in range(CONVERSATIONS)
    ]
    need = CONVERSATIONS * lengths.of(CONVERSATION_TOKENS + 60)
    title = "Sixteen conversations where memory has room for a quarter of them, two rounds"
    return Scenario(6, title, _alone([*first, *second]), limit_tokens=need // 4)


def unrelated(lengths: PromptLengths) -> Scenario:
    asks = [LoadRequest(f"7 {n}", (user(lengths.text(f"7 {n}", 60)),), lengths.of(48)) for n in range(32)]
    return Scenario(
        7, "32 short unrelated requests", (ConcurrentRequests(tuple(map(ScenarioRequest, asks))),), "throughput"
    )


def beside(lengths: PromptLengths) -> Scenario:
    """Build a stream about as long as a server needs to compute the prompt that arrives meanwhile."""
    stream = ScenarioRequest(
        LoadRequest("8 stream", (user(f"{STORY} {lengths.text('8 stream', 20)}"),), lengths.of(400)), "counted"
    )
    comes = ScenarioRequest(LoadRequest("8 comes", (user(lengths.text("8 comes", 3000)),), 8))
    return Scenario(
        8, "A stream that goes on while a 3,000-token prompt comes in", (StreamBesidePrompt(stream, comes),), "pause"
    )


def tools(lengths: PromptLengths) -> Scenario:
    shape = LoadShape(turns=12, system=lengths.of(900), turn=lengths.of(530), reply=lengths.of(32))
    return Scenario(
        9,
        "An agent of 12 turns with tools, 1k growing to 7k tokens",
        _alone(_first_counted(agent(f"{lengths.key} 9", shape))),
    )


def _alone(requests: Iterable[ScenarioRequest]) -> tuple[Step, ...]:
    return tuple(ConcurrentRequests((request,)) for request in requests)


def _first_counted(asks: Iterable[LoadRequest]) -> list[ScenarioRequest]:
    """Count but do not time the first request: none of it can be cached, so its time says nothing about the cache."""
    return [ScenarioRequest(ask, "timed" if number else "counted") for number, ask in enumerate(asks)]
